"""Models that the library transformers computes: which classes it has, and the values of config.json that a plan needs.

Nothing here imports transformers, which imports torch: its table of classes is read from its source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader

INSTALL = "pip install 'armature-serve[transformers]'"
OWN_CODE = (
    "auto_map asks for code of the checkpoint's own, which is never run here (trust_remote_code stays off), and the installed"
    " transformers has no class of its own for what this model does."
)
CAUSAL, SEQ_TO_SEQ = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
_UNLIMITED_LEN = 32_768  # of a model whose config.json has no longest context, such as one with states
# Names of the same value in different classes, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", *_LAYERS)  # of a model with an encoder too
_LAYER_LISTS = ("layers_block_type", "layer_types")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim")
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    *("num_decoder_attention_heads", "encoder_attention_heads"),
)
_KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads")
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    *("max_target_positions", "context_length"),
)
_SOURCE_LENGTHS = ("max_source_positions", "max_encoder_position_embeddings", *_LENGTHS)
_TARGET_LENGTHS = ("max_target_positions", "max_decoder_position_embeddings", *_LENGTHS)
# Positions are counted from each other in these, so any length has one: what is trained is a length, not a bound.
_RELATIVE = ("relative_attention_num_buckets", "rope_theta", "rope_parameters")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The values of a config.json by which a plan counts memory. Loading measures what a token really takes."""

    kind: ClassVar[Literal["decoder", "encoder"]] = "decoder"

    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    max_source_len: int = 0  # of a model with an encoder, which reads the prompt; 0: it has none
    max_target_len: int = 0  # of its completion

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> TransformersConfig:
        """Read a config.json of a class that generates text. Raises `CheckpointInvalid` for any other."""
        architecture = _generating_class(values)
        has_encoder = values.get("is_encoder_decoder") is True
        section = ConfigReader(values).section("decoder" if has_encoder else "text_config")
        config = section if section.values else ConfigReader(values)
        lists = [config.values[name] for name in _LAYER_LISTS if isinstance(config.values.get(name), list)]
        layer_names = _DECODER_LAYERS if has_encoder else _LAYERS
        layers, hidden = (
            first_integer(config, layer_names, len(lists[0]) if lists else None),
            first_integer(config, _HIDDEN),
        )
        heads = first_integer(config, _HEADS, 1)
        kv_heads = first_integer(config, _KV_HEADS, heads)
        head_dim = first_integer(config, ("head_dim", "d_kv", "kv_channels"), max(1, hidden // heads))
        vocab_size = first_integer(
            config, ("decoder_vocab_size", "tgt_vocab_size", "vocab_size") if has_encoder else ("vocab_size",)
        )
        source, target = 0, first_integer(config, _LENGTHS, _UNLIMITED_LEN)
        if has_encoder:
            read = ConfigReader(values).section("encoder")
            read = read if read.values else config
            is_relative = any(config.values.get(name) is not None for name in _RELATIVE)
            source, target = (
                _UNLIMITED_LEN // 2 if is_relative else first_integer(part, names, _UNLIMITED_LEN // 2)
                for part, names in ((read, _SOURCE_LENGTHS), (config, _TARGET_LENGTHS))
            )
        target_len = target if has_encoder else 0
        return cls(architecture, vocab_size, source + target, layers, hidden, kv_heads, head_dim, source, target_len)


def first_integer(config: ConfigReader, names: tuple[str, ...], default: int | None = None) -> int:
    """Return the value of the first name that config.json has as an integer."""
    name = next((name for name in names if isinstance(config.values.get(name), int)), None)
    if name is None and default is not None:
        return default
    return config.integer(name or names[0])


def _generating_class(values: Mapping[str, Any]) -> str:
    listed = values.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    causal, from_text = class_table(CAUSAL), class_table(SEQ_TO_SEQ)
    if causal is None or from_text is None:
        raise CheckpointInvalid(f"The library transformers may serve this model: {INSTALL}.")
    table = from_text if values.get("is_encoder_decoder") is True else causal
    if table is causal and "text_config" in values:
        table = {**from_text, **causal}  # such as decoders that also read sounds
    known = {name for classes in table.values() for name in classes}
    found = [name for name in names if name in known] or ([] if names else table.get(str(values.get("model_type")), []))
    if found:
        return found[0]
    if values.get("auto_map"):
        raise CheckpointInvalid(OWN_CODE)
    raise CheckpointInvalid("The installed transformers has no class for this model that generates text either.")


@cache
def class_table(name: str = CAUSAL) -> Mapping[str, list[str]] | None:
    """Return one of transformers' tables: names of classes by model type; None if it is not installed."""
    spec = find_spec("transformers")
    return None if spec is None or spec.origin is None else dict(_rows(_tables(Path(spec.origin).parent), name))


@cache
def _tables(package: Path) -> ast.Module:
    return ast.parse((package / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))


def _rows(tree: ast.Module, table: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a table, which is written as OrderedDict([(model_type, class or classes), ...])."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if not any(isinstance(target, ast.Name) and target.id == table for target in targets):
            continue
        assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call), "written as a call"
        for model_type, classes in ast.literal_eval(statement.value.args[0]):
            yield model_type, [classes] if isinstance(classes, str) else list(classes)
