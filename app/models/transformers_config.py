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
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_UNLIMITED_LEN = 32_768  # of a model whose config.json has no longest context, such as one with states
# Names of the same value in different classes, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
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

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> TransformersConfig:
        """Read a config.json of a class in transformers' causal mapping. Raises `CheckpointInvalid` for any other."""
        architecture = _causal_class(values)
        text = ConfigReader(values).section("text_config")
        config = text if text.values else ConfigReader(values)
        lists = [config.values[name] for name in _LAYER_LISTS if isinstance(config.values.get(name), list)]
        layers, hidden = (
            first_integer(config, _LAYERS, len(lists[0]) if lists else None),
            first_integer(config, _HIDDEN),
        )
        heads = first_integer(config, _HEADS, 1)
        kv_heads = first_integer(config, _KV_HEADS, heads)
        head_dim = first_integer(config, ("head_dim", "d_kv", "kv_channels"), max(1, hidden // heads))
        length = first_integer(config, _LENGTHS, _UNLIMITED_LEN)
        return cls(architecture, config.integer("vocab_size"), length, layers, hidden, kv_heads, head_dim)


def first_integer(config: ConfigReader, names: tuple[str, ...], default: int | None = None) -> int:
    """Return the value of the first name that config.json has as an integer."""
    name = next((name for name in names if isinstance(config.values.get(name), int)), None)
    if name is None and default is not None:
        return default
    return config.integer(name or names[0])


def _causal_class(values: Mapping[str, Any]) -> str:
    listed = values.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    table = causal_classes()
    if table is None:
        raise CheckpointInvalid(f"The library transformers may serve this model: {INSTALL}.")
    known = {name for classes in table.values() for name in classes}
    found = [name for name in names if name in known] or ([] if names else table.get(str(values.get("model_type")), []))
    if found:
        return found[0]
    own_code = values.get("auto_map")
    if own_code:
        raise CheckpointInvalid(
            "auto_map asks for code of the checkpoint's own, which is never run here (trust_remote_code stays off), and"
            " the installed transformers has no class for this model that generates text."
        )
    raise CheckpointInvalid("The installed transformers has no class for this model that generates text either.")


@cache
def causal_classes() -> Mapping[str, list[str]] | None:
    """Return the names of transformers' classes that generate text by model type; None if it is not installed."""
    return class_table(_TABLE)


def class_table(name: str) -> Mapping[str, list[str]] | None:
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
