"""Families of encoders: what a config.json means where it is silent, and under which names their tensors are stored.

Torch is not needed. In a served encoder tensors have one set of names, whatever the family: `query` is the query's product everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.models.config import FAMILIES


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its name, without `.weight`; where several of ours lie in one, ours is `part` of `parts` equal ones, by rows."""

    name: str
    part: int = 0
    parts: int = 1


Names = Mapping[str, str | Stored]  # ours to theirs; {} is the layer's number


def _parts(name: str, *ours: str) -> dict[str, Stored]:
    return {one: Stored(name, part, len(ours)) for part, one in enumerate(ours)}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """`prefixes`: one stands before the names of all tensors but the head's where a head is saved. `layouts`: any of them may be met.

    `padding_offset`: learned positions begin behind the padding id. `theta` None: positions do not turn. `head`: see `encoder_heads`.
    """

    stem: str
    model_type: str
    prefixes: tuple[str, ...]
    layouts: tuple[Names, ...]
    head: str = "tanh"
    num_types: int = 2
    padding_offset: bool = False
    theta: float | None = None
    biases: bool = True  # of attention; and of the MLP where nothing else is said
    gated: bool = False


_BERT_EMBEDDINGS: Names = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_BERT_OUTPUTS: Names = {
    "layers.{}.attention_norm": "encoder.layer.{}.attention.LayerNorm",
    "layers.{}.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.down": "encoder.layer.{}.output.dense",
    "layers.{}.mlp_norm": "encoder.layer.{}.output.LayerNorm",
}
_POOLER_HEAD: Names = {"head.dense": "pooler.dense", "head.out": "classifier"}
_TWO_LAYER_HEAD: Names = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
_BERT_LAYERS: Names = {
    **_BERT_EMBEDDINGS,
    **_BERT_OUTPUTS,
    **{f"layers.{{}}.{name}": f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")},
    "layers.{}.out": "encoder.layer.{}.attention.output.dense",
    "layers.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
}
_MPNET: Names = {
    **_BERT_EMBEDDINGS,
    **_BERT_OUTPUTS,
    **{f"layers.{{}}.{ours}": f"encoder.layer.{{}}.attention.attn.{ours[0]}" for ours in ("query", "key", "value", "out")},
    "distance_bias": "encoder.relative_attention_bias",
    **_TWO_LAYER_HEAD,
}
_DISTILBERT: Names = {
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
_MODERNBERT: Names = {
    "embeddings.word": "embeddings.tok_embeddings",
    "embeddings.norm": "embeddings.norm",
    **_parts("layers.{}.attn.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "layers.{}.attn.Wo",
    "layers.{}.attention_norm": "layers.{}.attn_norm",
    **_parts("layers.{}.mlp.Wi", "layers.{}.gate", "layers.{}.up"),
    "layers.{}.down": "layers.{}.mlp.Wo",
    "layers.{}.mlp_norm": "layers.{}.mlp_norm",
    "final_norm": "final_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "head.out": "classifier",
}
# Encoders whose positions turn: as transformers names them, and as their authors first did.
_TURNING: Names = {
    **_BERT_EMBEDDINGS,
    **{f"layers.{{}}.{ours}": f"layers.{{}}.self_attn.{ours[0]}_proj" for ours in ("query", "key", "value", "out")},
    "layers.{}.attention_norm": "layers.{}.post_attention_layernorm",
    "layers.{}.gate": "layers.{}.mlp.gate_proj",
    "layers.{}.up": "layers.{}.mlp.up_proj",
    "layers.{}.down": "layers.{}.mlp.down_proj",
    "layers.{}.mlp_norm": "layers.{}.post_mlp_layernorm",
    **_POOLER_HEAD,
}
_JINA: Names = {**_TURNING, "layers.{}.up": "layers.{}.mlp.fc1", "layers.{}.down": "layers.{}.mlp.fc2", **_TWO_LAYER_HEAD}
_FIRST_NAMES: Names = {
    "embeddings.norm": "emb_ln",
    "layers.{}.attention_norm": "encoder.layers.{}.norm1",
    "layers.{}.mlp_norm": "encoder.layers.{}.norm2",
}
_FIRST_NOMIC: Names = {
    **_TURNING,
    **_FIRST_NAMES,
    **_parts("encoder.layers.{}.attn.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layers.{}.attn.out_proj",
    "layers.{}.gate": "encoder.layers.{}.mlp.fc12",
    "layers.{}.up": "encoder.layers.{}.mlp.fc11",
    "layers.{}.down": "encoder.layers.{}.mlp.fc2",
}
_FIRST_JINA: Names = {
    **_JINA,
    **_FIRST_NAMES,
    **_parts("encoder.layers.{}.mixer.Wqkv", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layers.{}.mixer.out_proj",
    "layers.{}.up": "encoder.layers.{}.mlp.fc1",
    "layers.{}.down": "encoder.layers.{}.mlp.fc2",
}
_FIRST_GTE: Names = {
    **_TURNING,
    **_parts("encoder.layer.{}.attention.qkv_proj", "layers.{}.query", "layers.{}.key", "layers.{}.value"),
    "layers.{}.out": "encoder.layer.{}.attention.o_proj",
    "layers.{}.attention_norm": "encoder.layer.{}.attn_ln",
    **_parts("encoder.layer.{}.mlp.up_gate_proj", "layers.{}.up", "layers.{}.gate"),
    "layers.{}.down": "encoder.layer.{}.mlp.down_proj",
    "layers.{}.mlp_norm": "encoder.layer.{}.mlp_ln",
}

_ROBERTA: Names = {**_BERT_LAYERS, **_TWO_LAYER_HEAD}

ENCODER_FAMILIES: tuple[EncoderFamily, ...] = (
    EncoderFamily("Bert", "bert", ("bert.",), ({**_BERT_LAYERS, **_POOLER_HEAD},)),
    EncoderFamily("Roberta", "roberta", ("roberta.",), (_ROBERTA,), padding_offset=True),
    EncoderFamily("XLMRoberta", "xlm-roberta", ("roberta.",), (_ROBERTA,), padding_offset=True),
    EncoderFamily("Camembert", "camembert", ("roberta.",), (_ROBERTA,), padding_offset=True),
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
    EncoderFamily("NomicBert", "nomic_bert", ("nomic_bert.",), (_TURNING, _FIRST_NOMIC), theta=1_000.0, biases=False, gated=True),
    EncoderFamily("Gte", "gte", ("gte.", "new."), (_TURNING, _FIRST_GTE), num_types=1, theta=160_000.0, gated=True),
    EncoderFamily("JinaEmbeddingsV3", "jina_embeddings_v3", ("roberta.",), (_JINA, _FIRST_JINA), num_types=1, theta=20_000.0),
)


def stored_names(names: Names, num_layers: int) -> Iterator[tuple[str, Stored]]:
    """Ours and theirs of a layout, with every layer's number put in."""
    for ours, theirs in names.items():
        stored = theirs if isinstance(theirs, Stored) else Stored(theirs)
        for layer in range(num_layers) if "{}" in ours else (0,):
            yield ours.format(layer), Stored(stored.name.format(layer), stored.part, stored.parts)


# ---- which family a config.json speaks of ----------------------------------------------------------------------------

CLASSIFIES = "ForSequenceClassification"
_USES = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIES)  # heads that guess words have no part in an embedding
# Decoders served for their hidden states, by the beginning of their classes' names; what `FAMILIES` calls them.
DECODER_STEMS: Mapping[str, str] = {
    **{name.removesuffix("ForCausalLM"): name for name in FAMILIES if name.endswith("ForCausalLM")},
    "Gemma3Text": "Gemma3ForCausalLM",
    "EuroBert": "LlamaForCausalLM",  # whose tokens see all of their text
}
_BY_STEM = {family.stem: family for family in ENCODER_FAMILIES}


@dataclass(frozen=True, slots=True)
class EncoderClass:
    """What an architecture's name says: the family, or the decoder whose layers it has, and whether it ends in labels."""

    name: str
    family: EncoderFamily | None
    decoder: str | None
    classifies: bool

    @property
    def stem(self) -> str:
        return _stem(self.name) or ""


def encoder_class(name: str, pools: bool) -> EncoderClass | None:
    """None: no encoder that we know. `pools`: the directory says how hidden states become vectors, so any head is left out."""
    stem = _stem(name)
    if stem is None:
        return None
    use = name.removeprefix(stem)
    if not (use in _USES or (pools and use.startswith("For"))):
        return None
    return EncoderClass(name, _BY_STEM.get(stem), DECODER_STEMS.get(stem), use == CLASSIFIES and not pools)


def family_of(name: str) -> EncoderFamily:
    """Of an encoder's architecture."""
    return _BY_STEM[_stem(name) or ""]


def _stem(name: str) -> str | None:
    return max((stem for stem in (*_BY_STEM, *DECODER_STEMS) if name.startswith(stem)), key=len, default=None)


def supported_encoders() -> str:
    """For a refusal."""
    return ", ".join(f"{stem}Model" for stem in (*_BY_STEM, *DECODER_STEMS))
