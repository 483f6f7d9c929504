"""Tiny random encoders of every supported family, as their files are published: `write_encoder(directory, "BertModel")`.

Weights, config.json and a WordPiece tokenizer; with `modules` a sentence-transformers directory. Deterministic by seed, and every weight
matters. Heads are those of transformers: `BertForSequenceClassification` has one label unless `num_labels` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from encoder_families import FAMILIES, HIDDEN, LENGTH, TINY, Family
from tiny_checkpoints import config_values, write_tokenizer, write_weights

SPECIALS = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
}
WORDS = ("the", "fox", "said", "hello", "world", "green", "wood", "##s", "##ing", "##er")
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
    values = {
        **base,
        **family.values,
        "model_type": family.model_type,
        "architectures": [architecture],
        "dtype": "float32",
    }
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
        _write_json(
            directory / "sentence_bert_config.json", {"max_seq_length": self.max_seq_length, "do_lower_case": False}
        )
        words = {"prompts": dict(self.prompts or {}), "default_prompt_name": self.default_prompt_name}
        _write_json(directory / "config_sentence_transformers.json", words)
        pooling = {f"pooling_mode_{mode}": mode in self.modes for mode in _MODES}
        _write_json(_folder(directory, folders[1]) / "config.json", {"word_embedding_dimension": HIDDEN, **pooling})
        size, generator = HIDDEN * len(self.modes), torch.Generator().manual_seed(seed + 1)
        for folder, (outputs, activation) in zip(folders[2:], self.dense, strict=False):
            says = {"in_features": size, "out_features": outputs, "bias": True, "activation_function": activation}
            _write_json(_folder(directory, folder) / "config.json", says)
            weight = torch.randn((outputs, size), generator=generator) / size**0.5
            write_weights(
                directory / folder, {"linear.weight": weight, "linear.bias": torch.randn(outputs, generator=generator)}
            )
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
    kind = "BertTokenizer" if bert else "PreTrainedTokenizerFast"
    _write_json(directory / "tokenizer_config.json", {**words, "tokenizer_class": kind})


def _folder(directory: Path, name: str) -> Path:
    (directory / name).mkdir(exist_ok=True)
    return directory / name


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1))
