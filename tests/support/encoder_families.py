"""The supported encoder families: what their config.json says and which tensors their files hold, by the names they are published with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of

Shapes = dict[str, tuple[int, ...]]

VOCAB, HIDDEN, INNER, HEADS, LENGTH = 320, 32, 48, 4, 128

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
ROBERTA = {"max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
ELECTRA = {"type_vocab_size": 2, "embedding_size": HIDDEN}
DISTILBERT = {"dim": HIDDEN, "hidden_dim": INNER, "n_layers": 2, "n_heads": HEADS, "activation": "gelu"}
MODERNBERT = {
    "num_hidden_layers": 4,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "classifier_pooling": "mean",
}
NOMIC = {"hidden_act": "silu", "type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
GTE = {"type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}}
JINA = {
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
EUROBERT = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "classifier_pooling": "mean",
}
GEMMA = {"num_hidden_layers": 3, "sliding_window_pattern": 3, "sliding_window": 8, "use_bidirectional_attention": True}


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm(name: str, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (HIDDEN,), **({f"{name}.bias": (HIDDEN,)} if bias else {})}


def _embeddings(values: Mapping[str, Any], norm: str = "embeddings.LayerNorm", learned: bool = True) -> Shapes:
    shapes = {"embeddings.word_embeddings.weight": (values["vocab_size"], HIDDEN), **_norm(norm)}
    if learned:
        shapes["embeddings.position_embeddings.weight"] = (values["max_position_embeddings"], HIDDEN)
    if values.get("type_vocab_size"):
        shapes["embeddings.token_type_embeddings.weight"] = (values["type_vocab_size"], HIDDEN)
    return shapes


def _bert(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{at}.attention.{part}", HIDDEN, HIDDEN)
        shapes |= _norm(f"{at}.attention.output.LayerNorm") | _norm(f"{at}.output.LayerNorm")
        shapes |= _linear(f"{at}.intermediate.dense", INNER, HIDDEN) | _linear(f"{at}.output.dense", HIDDEN, INNER)
    return shapes


def _distilbert(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values)
    for layer in range(values["n_layers"]):
        at = f"transformer.layer.{layer}"
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= _linear(f"{at}.attention.{part}", HIDDEN, HIDDEN)
        shapes |= _norm(f"{at}.sa_layer_norm") | _norm(f"{at}.output_layer_norm")
        shapes |= _linear(f"{at}.ffn.lin1", INNER, HIDDEN) | _linear(f"{at}.ffn.lin2", HIDDEN, INNER)
    return shapes


def _mpnet(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values) | {"encoder.relative_attention_bias.weight": (32, HEADS)}
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        for part in ("q", "k", "v", "o"):
            shapes |= _linear(f"{at}.attention.attn.{part}", HIDDEN, HIDDEN)
        shapes |= _norm(f"{at}.attention.LayerNorm") | _norm(f"{at}.output.LayerNorm")
        shapes |= _linear(f"{at}.intermediate.dense", INNER, HIDDEN) | _linear(f"{at}.output.dense", HIDDEN, INNER)
    return shapes


def _modernbert(values: Mapping[str, Any]) -> Shapes:
    shapes = {"embeddings.tok_embeddings.weight": (values["vocab_size"], HIDDEN)}
    shapes |= _norm("embeddings.norm", bias=False) | _norm("final_norm", bias=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"layers.{layer}"
        shapes |= _norm(f"{at}.attn_norm", bias=False) if layer else {}
        shapes |= _norm(f"{at}.mlp_norm", bias=False)
        shapes |= _linear(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN, bias=False) | _linear(
            f"{at}.attn.Wo", HIDDEN, HIDDEN, bias=False
        )
        shapes |= _linear(f"{at}.mlp.Wi", 2 * INNER, HIDDEN, bias=False) | _linear(
            f"{at}.mlp.Wo", HIDDEN, INNER, bias=False
        )
    return shapes


def _nomic(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values, "emb_ln", learned=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layers.{layer}"
        shapes |= _linear(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN, False) | _linear(
            f"{at}.attn.out_proj", HIDDEN, HIDDEN, False
        )
        shapes |= _norm(f"{at}.norm1") | _norm(f"{at}.norm2") | _linear(f"{at}.mlp.fc2", HIDDEN, INNER, False)
        shapes |= _linear(f"{at}.mlp.fc11", INNER, HIDDEN, False) | _linear(f"{at}.mlp.fc12", INNER, HIDDEN, False)
    return shapes


def _gte(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values, learned=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        shapes |= _linear(f"{at}.attention.qkv_proj", 3 * HIDDEN, HIDDEN) | _linear(
            f"{at}.attention.o_proj", HIDDEN, HIDDEN
        )
        shapes |= _norm(f"{at}.attn_ln") | _norm(f"{at}.mlp_ln")
        shapes |= _linear(f"{at}.mlp.up_gate_proj", 2 * INNER, HIDDEN, False) | _linear(
            f"{at}.mlp.down_proj", HIDDEN, INNER
        )
    return shapes


def _jina(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values, "emb_ln", learned=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layers.{layer}"
        shapes |= _linear(f"{at}.mixer.Wqkv", 3 * HIDDEN, HIDDEN) | _linear(f"{at}.mixer.out_proj", HIDDEN, HIDDEN)
        shapes |= _norm(f"{at}.norm1") | _norm(f"{at}.norm2")
        shapes |= _linear(f"{at}.mlp.fc1", INNER, HIDDEN) | _linear(f"{at}.mlp.fc2", HIDDEN, INNER)
    return shapes


def _decoder(architecture: str) -> Callable[[Mapping[str, Any]], Shapes]:
    """As this family's decoder, without output layer and prefix."""

    def shapes(values: Mapping[str, Any]) -> Shapes:
        plain = {
            **values,
            "use_bidirectional_attention": False,
            "architectures": [architecture],
            "tie_word_embeddings": True,
        }
        if architecture == "LlamaForCausalLM":
            plain["model_type"] = "llama"
        config = ModelConfig.from_hf(plain)
        return {name.removeprefix("model."): shape for name, shape in tensors_of(config).items()}

    return shapes


def _dense_head(name: str, out: str) -> Callable[[int], Shapes]:
    return lambda labels: _linear(name, HIDDEN, HIDDEN) | _linear(out, labels, HIDDEN)


def _modernbert_head(labels: int) -> Shapes:
    dense = _linear("head.dense", HIDDEN, HIDDEN, bias=False) | _norm("head.norm", bias=False)
    return dense | _linear("classifier", labels, HIDDEN)


def _score(labels: int) -> Shapes:
    return _linear("score", labels, HIDDEN, bias=False)


@dataclass(frozen=True, slots=True)
class Family:
    """`name` begins its classes' names; `values` of config.json; `prefix` of the base model's tensors where a head stands beside it."""

    name: str
    model_type: str
    values: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    prefix: str
    head: Callable[[int], Shapes]
    pooler: bool = False  # the head's first product belongs to the base model
    specials: str = "bert"


BERT_HEAD = _dense_head("pooler.dense", "classifier")
ROBERTA_HEAD = _dense_head("classifier.dense", "classifier.out_proj")
_FAMILIES = (
    Family("Bert", "bert", {"type_vocab_size": 2}, _bert, "bert", BERT_HEAD, pooler=True),
    Family("Roberta", "roberta", ROBERTA, _bert, "roberta", ROBERTA_HEAD, specials="roberta"),
    Family("XLMRoberta", "xlm-roberta", ROBERTA, _bert, "roberta", ROBERTA_HEAD, specials="roberta"),
    Family("Camembert", "camembert", ROBERTA, _bert, "roberta", ROBERTA_HEAD, specials="roberta"),
    Family("Electra", "electra", ELECTRA, _bert, "electra", ROBERTA_HEAD),
    Family(
        "DistilBert", "distilbert", DISTILBERT, _distilbert, "distilbert", _dense_head("pre_classifier", "classifier")
    ),
    Family("MPNet", "mpnet", {**ROBERTA, "type_vocab_size": 0}, _mpnet, "mpnet", ROBERTA_HEAD, specials="roberta"),
    Family("ModernBert", "modernbert", MODERNBERT, _modernbert, "model", _modernbert_head),
    Family("NomicBert", "nomic_bert", NOMIC, _nomic, "nomic_bert", BERT_HEAD, pooler=True),
    Family("Gte", "gte", GTE, _gte, "gte", BERT_HEAD, pooler=True),
    Family("JinaEmbeddingsV3", "jina_embeddings_v3", JINA, _jina, "roberta", ROBERTA_HEAD, specials="roberta"),
    Family("EuroBert", "eurobert", EUROBERT, _decoder("LlamaForCausalLM"), "model", _dense_head("dense", "classifier")),
    Family("Llama", "llama", {}, _decoder("LlamaForCausalLM"), "model", _score),
    Family("Qwen3", "qwen3", {"head_dim": 16}, _decoder("Qwen3ForCausalLM"), "model", _score),
    Family("Mistral", "mistral", {}, _decoder("MistralForCausalLM"), "model", _score),
    Family("Gemma3Text", "gemma3_text", GEMMA, _decoder("Gemma3ForCausalLM"), "model", _score),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
