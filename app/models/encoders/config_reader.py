"""Reads an encoder's config.json.

Absent values get the family's default, as in transformers; values that are not understood are rejected by name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from app.errors import CheckpointInvalid, NotNative
from app.models.config_reader import MAX_INTEGER, MAX_LAYERS, ConfigReader
from app.models.decoders.config import ACTIVATIONS, ModelConfig
from app.models.decoders.families import reason_of
from app.models.decoders.rope import RopeConfig, parse_rope
from app.models.encoders.config import (
    DenseActivation,
    EncoderActivation,
    EncoderConfig,
    HeadConfig,
    PoolingConfig,
    ScoreFunction,
)
from app.models.encoders.families import (
    CLASSIFIER_SUFFIX,
    ENCODER_FAMILIES,
    EncoderClass,
    EncoderFamily,
    parse_encoder_class,
    supported_encoders,
    to_transformers_names,
)

# Last part of a torch module's path in sentence-transformers files -> activation.
TORCH_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "Tanh": "tanh",
    "Identity": "identity",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_CONFIG_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
# Activation of the first layer of a family's head, by the kind of head.
_HEAD_ACTIVATIONS: Mapping[str, DenseActivation] = {"tanh": "tanh", "relu": "relu", "gelu": "gelu"}
# Kinds of problems, as transformers' configuration_utils.py checks them.
_PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")
_DEFAULT_LABELS = 2  # default of transformers
ENCODER_ACTIVATIONS: Mapping[str, EncoderActivation] = {
    **ACTIVATIONS,
    "relu": "relu",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
}
MPNET_BUCKETS = 32  # fixed, whatever config.json contains: transformers always uses this number
# Endings of the names of classes that give vectors or labels.
_ENCODER_ENDINGS = (
    "Model",
    "ForMaskedLM",
    "ForPreTraining",
    CLASSIFIER_SUFFIX,
    "ForTokenClassification",
    "ForQuestionAnswering",
)
# Names of these values in DistilBERT's config.json.
_DISTILBERT_NAMES: Mapping[str, str] = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
}


def read_head(kind: EncoderClass, config: ConfigReader) -> HeadConfig:
    if kind.stem == "EuroBert":
        return HeadConfig(
            pooling=_pooling(config, {"bos": "cls", "mean": "mean", "late": "late"}, "late"), activation="gelu"
        )
    if kind.family is None:
        return HeadConfig(pooling="last", dense=False, bias=False)
    if kind.family.head == "normed":
        bias, activation = config.boolean("classifier_bias", False), _head_activation(config)
        return HeadConfig(_pooling(config, {"cls": "cls", "mean": "mean"}, "cls"), True, bias, activation, norm=True)
    return HeadConfig(activation=_HEAD_ACTIVATIONS[kind.family.head])


def _pooling(
    config: ConfigReader, known: Mapping[str, Literal["cls", "mean", "late"]], default: str
) -> Literal["cls", "mean", "late"]:
    name = config.text("classifier_pooling", default)
    if name not in known:
        raise CheckpointInvalid(f"config.json: classifier_pooling {name!r} is not known; known are {', '.join(known)}.")
    return known[name]


def _head_activation(config: ConfigReader) -> DenseActivation:
    name = config.text("classifier_activation", "gelu")
    if name not in _CONFIG_ACTIVATIONS:
        raise CheckpointInvalid(
            f"config.json: classifier_activation {name!r} is not known; known are {', '.join(_CONFIG_ACTIVATIONS)}."
        )
    return _CONFIG_ACTIVATIONS[name]


def read_labels(config: ConfigReader) -> tuple[str, ...]:
    """Return the label names by number from `id2label`, or LABEL_0 and so on as in transformers."""
    named = config.section("id2label").values
    if not named:
        return tuple(f"LABEL_{number}" for number in range(config.integer("num_labels", _DEFAULT_LABELS)))
    labels = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointInvalid(f"config.json: id2label must name the labels 0 to {len(named) - 1} by strings.")
    return tuple(str(label) for label in labels)


def read_score_function(config: ConfigReader, num_labels: int) -> ScoreFunction:
    """Return the function that turns logits into scores.

    A single label gets the function that the checkpoint names. Otherwise `problem_type` decides. Source: transformers'
    pipelines/text_classification.py.
    """
    named = config.section("sentence_transformers").values.get("activation_fn")
    named = config.values.get("sbert_ce_default_activation_function") if named is None else named
    if num_labels == 1 and named is not None:
        return score_function(named)
    problem = config.values.get("problem_type")
    if problem not in _PROBLEMS:
        known = ", ".join(filter(None, _PROBLEMS))
        raise CheckpointInvalid(f"config.json: problem_type {problem!r} is not known; known are {known}.")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def score_function(path: Any) -> ScoreFunction:
    name = str(path).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity", "Softmax"):
        raise CheckpointInvalid(
            f"The score function {path!r} of this cross-encoder is not supported; supported are Sigmoid, Identity and Softmax."
        )
    return "sigmoid" if name == "Sigmoid" else "identity" if name == "Identity" else "softmax"


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """The settings of a sentence-transformers directory apart from config.json; empty for other checkpoints.

    `max_tokens` is the length to which texts were cut in training. `prompts` and `default_prompt` are those of a cross-
    encoder; an embedding model has them in `pooling`.
    """

    pooling: PoolingConfig | None = None
    max_tokens: int | None = None
    lowercases: bool = False
    scores: ScoreFunction | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def is_encoder(values: Mapping[str, Any], sentence: SentenceConfig) -> bool:
    """Return True if this checkpoint is served for vectors or labels; otherwise it is a decoder."""
    return sentence.pooling is not None or _encoder_class_of(values, pools=False) is not None


def names_encoder(values: Mapping[str, Any]) -> bool:
    """Return True if config.json names a class that is no language model, whether it is supported or not."""
    names = values.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return bool(names) and all(
        name.endswith(_ENCODER_ENDINGS) and not name.endswith("LMHeadModel") and reason_of(name) is None
        for name in names
    )


def read_encoder(values: Mapping[str, Any], sentence: SentenceConfig | None = None) -> EncoderConfig:
    """Return the config. Raises `CheckpointInvalid` for values that are missing, wrong or unknown."""
    sentence = SentenceConfig() if sentence is None else sentence
    kind = _encoder_class_of(values, sentence.pooling is not None)
    if kind is None:
        said = values.get("architectures") or values.get("model_type")
        raise NotNative(
            f"config.json: {said} is not supported as an encoder; supported are {supported_encoders()}, each with its ForMaskedLM and"
            " ForSequenceClassification."
        )
    config = to_transformers_names(ConfigReader(values)) if kind.stem == "NomicBert" else ConfigReader(values)
    read = _read_decoder(kind, config) if kind.family is None else _read_encoder(kind.family, kind, config)
    if kind.classifies:
        labels = read_labels(config)
        read = replace(
            read,
            head=read_head(kind, config),
            pooling=replace(read.pooling, prompts=sentence.prompts, default_prompt=sentence.default_prompt),
            labels=labels,
            scores=sentence.scores or read_score_function(config, len(labels)),
        )
    elif sentence.pooling is not None:
        read = replace(read, pooling=_checked_pooling(sentence.pooling, read.hidden_size))
    longest = read.max_model_len if sentence.max_tokens is None else min(sentence.max_tokens, read.max_model_len)
    return replace(read, architecture=kind.name, max_model_len=longest, lowercases=sentence.lowercases)


def _checked_pooling(pooling: PoolingConfig, hidden_size: int) -> PoolingConfig:
    size = hidden_size * len(pooling.modes)
    for dense in pooling.dense:
        if dense.in_features != size:
            raise CheckpointInvalid(
                f"{dense.folder}/config.json: in_features is {dense.in_features}, but its input has {size}."
            )
        size = dense.out_features
    return pooling


def _encoder_class_of(values: Mapping[str, Any], pools: bool) -> EncoderClass | None:
    names = values.get("architectures") or _by_model_type(values.get("model_type"))
    found = (
        [parse_encoder_class(name, pools) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    )
    return next((one for one in found if one is not None), None)


def _by_model_type(model_type: Any) -> list[str]:
    """Return the plain encoder of a config.json that names no architecture. Decoders are not included."""
    return [f"{family.stem}Model" for family in ENCODER_FAMILIES if family.model_type == model_type]


# ---- decoders ------------------------------------------------------------------------------------------------------


def _read_decoder(kind: EncoderClass, config: ConfigReader) -> EncoderConfig:
    """Read a decoder served as an encoder: the vector is the last token's, or the mean if bidirectional."""
    assert kind.decoder is not None, "a class of no family is a decoder's"
    is_eurobert = kind.stem == "EuroBert"
    bidirectional = is_eurobert or config.boolean("use_bidirectional_attention", False)
    defaults = {"rms_norm_eps": 1e-5} if is_eurobert else {}
    own = {"architectures": [kind.decoder], "use_bidirectional_attention": None}
    values = ChainMap[str, Any](own, cast(dict[str, Any], config.values), defaults)
    decoder = replace(ModelConfig.from_hf(values), tie_embeddings=True)  # there is no output layer
    return EncoderConfig(
        architecture=kind.name,
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        vocab_size=decoder.vocab_size,
        max_model_len=decoder.max_model_len,
        norm_eps=decoder.norm_eps,
        activation=decoder.activation,
        windows=decoder.windows,
        ropes=decoder.ropes,
        pre_norm=True,
        gated=True,
        qkv_bias=decoder.qkv_bias,
        output_bias=decoder.output_bias,
        mlp_bias=decoder.mlp_bias,
        down_bias=decoder.mlp_bias,
        norm_bias=False,
        bidirectional=bidirectional,
        pooling=PoolingConfig(("mean",) if bidirectional else ("last",)),
        decoder=decoder,
    )


# ---- encoders ------------------------------------------------------------------------------------------------------


def _read_encoder(family: EncoderFamily, kind: EncoderClass, config: ConfigReader) -> EncoderConfig:
    _reject_unsupported(config)
    num_layers = _integer(config, family, "num_hidden_layers", MAX_LAYERS)
    num_heads = _integer(config, family, "num_attention_heads")
    hidden_size = _integer(config, family, "hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim * num_heads != hidden_size:
        raise CheckpointInvalid(
            f"config.json: {num_heads} attention heads cannot share hidden_size {hidden_size} evenly."
        )
    windows, ropes = _windows(config, family, num_layers), _ropes(config, family, head_dim, num_layers)
    longest, padding_id = config.integer("max_position_embeddings", 512), _padding_id(config, family)
    num_positions = longest if family.theta is None else 0
    modern = family.stem == "ModernBert"
    bias = config.boolean("attention_bias", False) if modern else family.biases
    mlp_bias = config.boolean("mlp_bias", False) if modern else family.biases and not family.gated
    return EncoderConfig(
        architecture=kind.name,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, family, "intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_model_len=longest if padding_id is None else longest - padding_id - 1,
        norm_eps=_norm_eps(config, family),
        activation=_activation(config, family),
        windows=windows,
        ropes=ropes,
        pre_norm=modern,
        gated=family.gated,
        num_positions=num_positions,
        padding_id=padding_id,
        num_types=config.integer("type_vocab_size", family.num_types, at_least=0) if family.num_types else 0,
        distance_buckets=_distance_buckets(config) if family.stem == "MPNet" else 0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
        down_bias=mlp_bias or (family.biases and not modern),
        norm_bias=config.boolean("norm_bias", False) if modern else True,
    )


def _integer(config: ConfigReader, family: EncoderFamily, name: str, at_most: int = MAX_INTEGER) -> int:
    own = _DISTILBERT_NAMES[name] if family.stem == "DistilBert" else name
    return config.integer(own if config.has(own) else name, at_most=at_most)


def _reject_unsupported(config: ConfigReader) -> None:
    positions = config.text("position_embedding_type", "absolute")
    if positions not in ("absolute", "rotary", "rope"):
        raise CheckpointInvalid(
            f"config.json: position_embedding_type {positions!r} is not supported; only absolute positions are."
        )
    if config.has("embedding_size") and config.values["embedding_size"] != config.values.get("hidden_size"):
        raise CheckpointInvalid(
            f"config.json: embedding_size {config.values['embedding_size']!r} is not hidden_size, and a projection between them is not "
            "supported (ELECTRA's small models have one)."
        )
    if config.values.get("logn_attention_scale"):
        raise CheckpointInvalid(
            "config.json: logn_attention_scale, which scales scores with the length of the text, is not supported."
        )
    if config.values.get("is_decoder") or config.values.get("add_cross_attention"):
        raise CheckpointInvalid(
            "config.json: is_decoder and add_cross_attention are not supported: they make this model a part of an encoder-decoder."
        )


def _norm_eps(config: ConfigReader, family: EncoderFamily) -> float:
    if family.stem == "DistilBert":
        return 1e-12
    if family.stem == "ModernBert":
        return config.number("norm_eps", 1e-5)
    return config.number("layer_norm_eps", 1e-5 if family.stem == "JinaEmbeddingsV3" else 1e-12)


def _activation(config: ConfigReader, family: EncoderFamily) -> EncoderActivation:
    key = {"DistilBert": "activation", "ModernBert": "hidden_activation"}.get(family.stem, "hidden_act")
    name = config.text(key, "silu" if family.stem == "NomicBert" else "gelu")
    found = ENCODER_ACTIVATIONS.get(name)
    if found is None or (family.gated and found == "relu"):
        raise CheckpointInvalid(
            f"config.json: {key} {name!r} is not known; known are {', '.join(ENCODER_ACTIVATIONS)}."
        )
    return found


def _padding_id(config: ConfigReader, family: EncoderFamily) -> int | None:
    if not family.padding_offset:
        return None
    return 1 if family.stem == "MPNet" else config.integer("pad_token_id", 1, at_least=0)


def _distance_buckets(config: ConfigReader) -> int:
    buckets = config.integer("relative_attention_num_buckets", MPNET_BUCKETS)
    if buckets != MPNET_BUCKETS:
        raise CheckpointInvalid(
            f"config.json: relative_attention_num_buckets {buckets} is not supported; MPNet uses 32."
        )
    return buckets


def _windows(config: ConfigReader, family: EncoderFamily, num_layers: int) -> tuple[int | None, ...]:
    if family.stem != "ModernBert":
        return (None,) * num_layers
    window = config.integer("local_attention", 128)
    return tuple(window if slides else None for slides in _sliding_layers(config, num_layers))


def _sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if config.has("layer_types"):
        return [name == "sliding_attention" for name in config.texts("layer_types", num_layers)]
    every = config.integer("global_attn_every_n_layers", 3)
    return [layer % every != 0 for layer in range(num_layers)]


def _ropes(
    config: ConfigReader, family: EncoderFamily, head_dim: int, num_layers: int
) -> tuple[RopeConfig | None, ...]:
    if family.theta is None:
        return (None,) * num_layers
    if family.stem != "ModernBert":
        return (parse_rope(config, head_dim, family.theta),) * num_layers
    full = parse_rope(config, head_dim, config.number("global_rope_theta", family.theta), "full_attention")
    local = parse_rope(config, head_dim, config.number("local_rope_theta", 10_000.0), "sliding_attention")
    return tuple(local if slides else full for slides in _sliding_layers(config, num_layers))
