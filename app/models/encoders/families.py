"""Families of encoders: the defaults of their config.json, and the names of their tensors in checkpoints.

A served encoder has one set of tensor names for all families. The first config.json files of Nomic's encoders use
GPT-2's names and are translated to those of transformers.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.families import DECODER_FAMILIES

_BERT_EMBEDDINGS: TensorNames = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_BERT_OUTPUTS: TensorNames = {
    "layers.{}.attention_norm": "encoder.layer.{}.attention.LayerNorm",
    "layers.{}.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.down": "encoder.layer.{}.output.dense",
    "layers.{}.mlp_norm": "encoder.layer.{}.output.LayerNorm",
}
_POOLER_HEAD: TensorNames = {"head.dense": "pooler.dense", "head.out": "classifier"}
_TWO_LAYER_HEAD: TensorNames = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
_BERT_LAYERS: TensorNames = {
    **_BERT_EMBEDDINGS,
    **_BERT_OUTPUTS,
    **{f"layers.{{}}.{name}": f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")},
    "layers.{}.out": "encoder.layer.{}.attention.output.dense",
    "layers.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
}
_MPNET: TensorNames = {
    **_BERT_EMBEDDINGS,
    **_BERT_OUTPUTS,
    **{
        f"layers.{{}}.{ours}": f"encoder.layer.{{}}.attention.attn.{ours[0]}"
        for ours in ("query", "key", "value", "out")
    },
    "distance_bias": "encoder.relative_attention_bias",
    **_TWO_LAYER_HEAD,
}
_DISTILBERT: TensorNames = {
    **_BERT_EMBEDDINGS,
    **{f"layers.{{}}.{ours}": f"transformer.layer.{{}}.attention.{ours[0]}_lin" for ours in ("query", "key", "value")},
    "layers.{}.out": "transformer.layer.{}.attention.out_lin",
    "layers.{}.attention_norm": "transformer.layer.{}.sa_layer_norm",
    "layers.{}.up": "transformer.layer.{}.ffn.lin1",
    "layers.{}.down": "transformer.layer.{}.ffn.lin2",
    "layers.{}.mlp_norm": "transformer.layer.{}.output_layer_norm",
    "head.dense": "pre_classifier",
    "head.out": "classifier",
}
# Encoders with rotary positions: the names of transformers, and the authors' original names.
_ROTARY: TensorNames = {
    **_BERT_EMBEDDINGS,
    **{f"layers.{{}}.{ours}": f"layers.{{}}.self_attn.{ours[0]}_proj" for ours in ("query", "key", "value", "out")},
    "layers.{}.attention_norm": "layers.{}.post_attention_layernorm",
    "layers.{}.gate": "layers.{}.mlp.gate_proj",
    "layers.{}.up": "layers.{}.mlp.up_proj",
    "layers.{}.down": "layers.{}.mlp.down_proj",
    "layers.{}.mlp_norm": "layers.{}.post_mlp_layernorm",
    **_POOLER_HEAD,
}
_JINA: TensorNames = {
    **_ROTARY,
    "layers.{}.up": "layers.{}.mlp.fc1",
    "layers.{}.down": "layers.{}.mlp.fc2",
    **_TWO_LAYER_HEAD,
}
_ORIGINAL_NORMS: TensorNames = {
    "embeddings.norm": "emb_ln",
    "layers.{}.attention_norm": "encoder.layers.{}.norm1",
    "layers.{}.mlp_norm": "encoder.layers.{}.norm2",
}
_ROBERTA: TensorNames = {**_BERT_LAYERS, **_TWO_LAYER_HEAD}
# ---- the family of a config.json -----------------------------------------------------------------------------------

CLASSIFIER_SUFFIX = "ForSequenceClassification"
# heads that predict tokens are not part of an embedding
_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER_SUFFIX)
# Decoders served for their hidden states: prefix of the class name -> name in `DECODER_FAMILIES`.
DECODER_STEMS: Mapping[str, str] = {
    **{name.removesuffix("ForCausalLM"): name for name, family in DECODER_FAMILIES.items() if family.embeds},
    "Gemma3Text": "Gemma3ForCausalLM",
    "EuroBert": "LlamaForCausalLM",  # its attention is bidirectional
}
_NAMES: Mapping[str, str] = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
# Values that are required, since others would need another computation.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "use_rms_norm": (False, None),
    "rotary_emb_interleaved": (False,),
    "rotary_scaling_factor": (None,),
    "rotary_emb_scale_base": (None,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "num_experts": (0, None),
    "parallel_block": (False,),
}


@dataclass(frozen=True, slots=True)
class StoredName:
    """A tensor in a file, by its name without `.weight`. If it is fused, ours is `part` of `parts` blocks of rows."""

    name: str
    part: int = 0
    parts: int = 1


TensorNames = Mapping[str, str | StoredName]  # our name -> name in the file; {} is the layer number


def _fused(name: str, *ours: str) -> dict[str, StoredName]:
    return {one: StoredName(name, part, len(ours)) for part, one in enumerate(ours)}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders.

    - `prefixes`: if a head is saved, one precedes the names of all tensors except the head's.
    - `layouts`: the sets of tensor names that checkpoints use.
    - `padding_offset`: learned positions begin after the padding id.
    - `theta`: base of the rotary positions; None if there are none.
    - `head`: the kind of classification head (`models/encoders/config_reader.py`).
    """

    stem: str
    model_type: str
    prefixes: tuple[str, ...]
    layouts: tuple[TensorNames, ...]
    head: str = "tanh"
    num_types: int = 2
    padding_offset: bool = False
    theta: float | None = None
    biases: bool = True  # biases of attention, and of the MLP unless the config has its own flag
    gated: bool = False


_MODERNBERT: TensorNames = {
    "embeddings.word": "embeddings.tok_embeddings",
    "embeddings.norm": "embeddings.norm",
    **_fused("layers.{}.attn.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "layers.{}.attn.Wo",
    "layers.{}.attention_norm": "layers.{}.attn_norm",
    **_fused("layers.{}.mlp.Wi", "layers.{}.gate", "layers.{}.up"),
    "layers.{}.down": "layers.{}.mlp.Wo",
    "layers.{}.mlp_norm": "layers.{}.mlp_norm",
    "final_norm": "final_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "head.out": "classifier",
}
_ORIGINAL_NOMIC: TensorNames = {
    **_ROTARY,
    **_ORIGINAL_NORMS,
    **_fused("encoder.layers.{}.attn.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layers.{}.attn.out_proj",
    "layers.{}.gate": "encoder.layers.{}.mlp.fc12",
    "layers.{}.up": "encoder.layers.{}.mlp.fc11",
    "layers.{}.down": "encoder.layers.{}.mlp.fc2",
}
_ORIGINAL_JINA: TensorNames = {
    **_JINA,
    **_ORIGINAL_NORMS,
    **_fused("encoder.layers.{}.mixer.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layers.{}.mixer.out_proj",
    "layers.{}.up": "encoder.layers.{}.mlp.fc1",
    "layers.{}.down": "encoder.layers.{}.mlp.fc2",
}
_ORIGINAL_GTE: TensorNames = {
    **_ROTARY,
    **_fused("encoder.layer.{}.attention.qkv_proj", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layer.{}.attention.o_proj",
    "layers.{}.attention_norm": "encoder.layer.{}.attn_ln",
    **_fused("encoder.layer.{}.mlp.up_gate_proj", "layers.{}.up", "layers.{}.gate"),
    "layers.{}.down": "encoder.layer.{}.mlp.down_proj",
    "layers.{}.mlp_norm": "encoder.layer.{}.mlp_ln",
}

ENCODER_FAMILIES: tuple[EncoderFamily, ...] = (
    EncoderFamily("Bert", "bert", ("bert.",), ({**_BERT_LAYERS, **_POOLER_HEAD},)),
    EncoderFamily("Roberta", "roberta", ("roberta.",), (_ROBERTA,), padding_offset=True),
    EncoderFamily("XLMRoberta", "xlm-roberta", ("roberta.",), (_ROBERTA,), padding_offset=True),
    EncoderFamily("Camembert", "camembert", ("roberta.",), (_ROBERTA,), padding_offset=True),
    EncoderFamily("Electra", "electra", ("electra.",), (_ROBERTA,), head="gelu"),
    EncoderFamily("DistilBert", "distilbert", ("distilbert.",), (_DISTILBERT,), head="relu", num_types=0),
    EncoderFamily("MPNet", "mpnet", ("mpnet.",), (_MPNET,), num_types=0, padding_offset=True),
    EncoderFamily(
        "ModernBert",
        "modernbert",
        ("model.",),
        (_MODERNBERT,),
        head="normed",
        num_types=0,
        theta=160_000.0,
        biases=False,
        gated=True,
    ),
    EncoderFamily(
        "NomicBert", "nomic_bert", ("nomic_bert.",), (_ROTARY, _ORIGINAL_NOMIC), theta=1_000.0, biases=False, gated=True
    ),
    EncoderFamily("Gte", "gte", ("gte.", "new."), (_ROTARY, _ORIGINAL_GTE), num_types=1, theta=160_000.0, gated=True),
    EncoderFamily(
        "JinaEmbeddingsV3", "jina_embeddings_v3", ("roberta.",), (_JINA, _ORIGINAL_JINA), num_types=1, theta=20_000.0
    ),
)


def stored_names(names: TensorNames, num_layers: int) -> Iterator[tuple[str, StoredName]]:
    """Yield (our name, stored name) of a layout for every layer."""
    for ours, theirs in names.items():
        stored = theirs if isinstance(theirs, StoredName) else StoredName(theirs)
        for layer in range(num_layers) if "{}" in ours else (0,):
            yield ours.format(layer), StoredName(stored.name.format(layer), stored.part, stored.parts)


_BY_STEM = {family.stem: family for family in ENCODER_FAMILIES}


@dataclass(frozen=True, slots=True)
class EncoderClass:
    """The parts of an architecture's name: its family, the decoder whose layers it has, and if it ends in labels."""

    name: str
    family: EncoderFamily | None
    decoder: str | None
    classifies: bool

    @property
    def stem(self) -> str:
        return _stem(self.name) or ""


def parse_encoder_class(name: str, pools: bool) -> EncoderClass | None:
    """Parse the name of a supported encoder, else None. `pools`: the directory defines the pooling, not the head."""
    stem = _stem(name)
    if stem is None:
        return None
    use = name.removeprefix(stem)
    if not (use in _SUFFIXES or (pools and use.startswith("For"))):
        return None
    return EncoderClass(name, _BY_STEM.get(stem), DECODER_STEMS.get(stem), use == CLASSIFIER_SUFFIX and not pools)


def encoder_family(name: str) -> EncoderFamily:
    return _BY_STEM[_stem(name) or ""]


def _stem(name: str) -> str | None:
    return max((stem for stem in (*_BY_STEM, *DECODER_STEMS) if name.startswith(stem)), key=len, default=None)


def supported_encoders() -> str:
    return ", ".join(f"{stem}Model" for stem in (*_BY_STEM, *DECODER_STEMS))


def to_transformers_names(config: ConfigReader) -> ConfigReader:
    """Return the config with transformers' names. Raises `CheckpointInvalid` for unsupported values."""
    if not config.has("n_embd"):
        return config
    for name, allowed in _REQUIRED_VALUES.items():
        if name in config.values and config.values[name] not in allowed:
            raise CheckpointInvalid(f"config.json: {name} {config.values[name]!r} is not supported; {allowed[0]!r} is.")
    renamed = {new: config.values[old] for old, new in _NAMES.items() if config.has(old)}
    return ConfigReader(ChainMap({**renamed, "hidden_act": "silu"}, cast(dict[str, Any], config.values)))
