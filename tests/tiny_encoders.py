"""Tiny random encoders of every supported family, as their files are published: `write_encoder(directory, "BertModel")`.

Weights, config.json and a WordPiece tokenizer; with `modules` a sentence-transformers directory. Every weight matters, deterministic by seed.
Heads are those of transformers: `BertForSequenceClassification` has one label unless `num_labels` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from app.models.config import ModelConfig
from app.models.shapes import tensors_of
from tiny_checkpoints import config_values, write_tokenizer, write_weights

Shapes = dict[str, tuple[int, ...]]

VOCAB, HIDDEN, INNER, HEADS, LENGTH = 320, 32, 48, 4, 128
SPECIALS = {"bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>")}
WORDS = ("the", "fox", "said", "hello", "world", "green", "wood", "##s", "##ing", "##er")

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
JINA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
EUROBERT = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 8, "classifier_pooling": "mean"}
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
        shapes |= _linear(f"{at}.mlp.Wi", 2 * INNER, HIDDEN, bias=False) | _linear(f"{at}.mlp.Wo", HIDDEN, INNER, bias=False)
    return shapes


def _nomic(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values, "emb_ln", learned=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layers.{layer}"
        shapes |= _linear(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN, False) | _linear(f"{at}.attn.out_proj", HIDDEN, HIDDEN, False)
        shapes |= _norm(f"{at}.norm1") | _norm(f"{at}.norm2") | _linear(f"{at}.mlp.fc2", HIDDEN, INNER, False)
        shapes |= _linear(f"{at}.mlp.fc11", INNER, HIDDEN, False) | _linear(f"{at}.mlp.fc12", INNER, HIDDEN, False)
    return shapes


def _gte(values: Mapping[str, Any]) -> Shapes:
    shapes = _embeddings(values, learned=False)
    for layer in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        shapes |= _linear(f"{at}.attention.qkv_proj", 3 * HIDDEN, HIDDEN) | _linear(f"{at}.attention.o_proj", HIDDEN, HIDDEN)
        shapes |= _norm(f"{at}.attn_ln") | _norm(f"{at}.mlp_ln")
        shapes |= _linear(f"{at}.mlp.up_gate_proj", 2 * INNER, HIDDEN, False) | _linear(f"{at}.mlp.down_proj", HIDDEN, INNER)
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
        plain = {**values, "use_bidirectional_attention": False, "architectures": [architecture], "tie_word_embeddings": True}
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
    Family("DistilBert", "distilbert", DISTILBERT, _distilbert, "distilbert", _dense_head("pre_classifier", "classifier")),
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
CAUSAL = ("Llama", "Qwen3", "Mistral")  # embedders that pool the last token unless modules.json says otherwise
DECODERS = (*CAUSAL, "Gemma3Text")
SUFFIX = "ForSequenceClassification"


def family_of(architecture: str) -> Family:
    """By the name of a class: `…Model`, `…ForMaskedLM` or `…ForSequenceClassification`."""
    for suffix in (SUFFIX, "ForMaskedLM", "Model"):
        if architecture.endswith(suffix):
            return FAMILIES[architecture.removesuffix(suffix)]
    raise KeyError(architecture)


def encoder_values(architecture: str, num_labels: int = 1, **overrides: Any) -> dict[str, Any]:
    """A tiny config.json; an override of None writes null."""
    family = family_of(architecture)
    base = config_values(_DECODER_OF[family.name]) if family.name in DECODERS else TINY
    values = {**base, **family.values, "model_type": family.model_type, "architectures": [architecture], "dtype": "float32"}
    if architecture.endswith(SUFFIX):
        values["id2label"] = {str(index): f"LABEL_{index}" for index in range(num_labels)}
        values["label2id"] = {f"LABEL_{index}": index for index in range(num_labels)}
    return {**values, **overrides}


_DECODER_OF = {
    "Llama": "LlamaForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Gemma3Text": "Gemma3ForCausalLM",
}


def encoder_tensors(architecture: str, values: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by their published names, which keep activations near 1."""
    family, generator = family_of(architecture), torch.Generator().manual_seed(seed)
    shapes = family.shapes(values)
    if architecture.endswith(SUFFIX):
        labels = family.head(len(values["id2label"]))
        inner = {name: shape for name, shape in labels.items() if family.pooler and name.startswith("pooler")}
        shapes = {f"{family.prefix}.{name}": shape for name, shape in (shapes | inner).items()}
        shapes |= {name: shape for name, shape in labels.items() if name not in inner}
    gemma = family.model_type == "gemma3_text"
    return {name: _random(name, shape, generator, gemma) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, gemma: bool) -> torch.Tensor:
    tensor = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return tensor * 0.2 + (0.0 if gemma else 1.0) if name.endswith("weight") else tensor * 0.3
    is_table = "embed" in name or "relative_attention_bias" in name
    return tensor / (shape[1] ** 0.5 if gemma or not is_table else 1.0)


def write_encoder(
    directory: Path,
    architecture: str = "BertModel",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    modules: Modules | None = None,
    **overrides: Any,
) -> Path:
    """A whole checkpoint directory. `overrides` of config.json, or `num_labels`."""
    directory.mkdir(parents=True, exist_ok=True)
    values = encoder_values(architecture, **{"dtype": str(dtype).removeprefix("torch."), **overrides})
    _write_json(directory / "config.json", values)
    tensors = encoder_tensors(architecture, values, seed)
    write_weights(directory, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    family = family_of(architecture)
    if family.name in DECODERS:
        write_tokenizer(directory)
    else:
        write_word_pieces(directory, SPECIALS[family.specials])
    if modules is not None:
        modules.write(directory, seed)
    return directory


@dataclass(frozen=True, slots=True)
class Modules:
    """What makes a sentence-transformers directory of one: pooling `modes`, Dense layers as (outputs, activation's class), prompts."""

    modes: tuple[str, ...] = ("mean_tokens",)
    dense: tuple[tuple[int, str], ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    max_seq_length: int | None = LENGTH

    def write(self, directory: Path, seed: int = 0) -> None:
        at = "sentence_transformers.models"
        names = ["Transformer", "Pooling", *(["Dense"] * len(self.dense)), *(["Normalize"] if self.normalize else [])]
        folders = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
        listed = [
            {"idx": index, "name": str(index), "path": folder, "type": f"{at}.{name}"}
            for index, (name, folder) in enumerate(zip(names, folders, strict=True))
        ]
        _write_json(directory / "modules.json", listed)
        _write_json(directory / "sentence_bert_config.json", {"max_seq_length": self.max_seq_length, "do_lower_case": False})
        words = {"prompts": dict(self.prompts or {}), "default_prompt_name": self.default_prompt_name}
        _write_json(directory / "config_sentence_transformers.json", words)
        pooling = {f"pooling_mode_{mode}": mode in self.modes for mode in _MODES}
        _write_json(_folder(directory, folders[1]) / "config.json", {"word_embedding_dimension": HIDDEN, **pooling})
        size, generator = HIDDEN * len(self.modes), torch.Generator().manual_seed(seed + 1)
        for folder, (outputs, activation) in zip(folders[2:], self.dense, strict=False):
            says = {"in_features": size, "out_features": outputs, "bias": True, "activation_function": activation}
            _write_json(_folder(directory, folder) / "config.json", says)
            weight = torch.randn((outputs, size), generator=generator) / size**0.5
            write_weights(directory / folder, {"linear.weight": weight, "linear.bias": torch.randn(outputs, generator=generator)})
            size = outputs


_MODES = (
    "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken",
)  # fmt: skip


def write_word_pieces(directory: Path, specials: tuple[str, ...] = SPECIALS["bert"]) -> None:
    """WordPiece of specials, all printable ASCII alone and within words, and a few words; two segments where a text is a pair."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    bert = specials[0] == "[PAD]"
    begin, end, unknown = (specials[2], specials[3], specials[1]) if bert else (specials[0], specials[2], specials[3])
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.add_special_tokens(list(specials))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pair = f"{begin} $A {end} $B:1 {end}:1" if bert else f"{begin} $A {end} {end} $B {end}"
    ids = [(begin, vocab[begin]), (end, vocab[end])]
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A {end}", pair=pair, special_tokens=ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    words = {"cls_token": begin, "sep_token": end, "unk_token": unknown, "pad_token": specials[0 if bert else 1]}
    _write_json(directory / "tokenizer_config.json", {**words, "tokenizer_class": "PreTrainedTokenizerFast"})


def _folder(directory: Path, name: str) -> Path:
    (directory / name).mkdir(exist_ok=True)
    return directory / name


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1))
