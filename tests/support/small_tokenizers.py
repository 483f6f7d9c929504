"""Tokenizers of a few hundred tokens in the three forms that language models use, written as the files of a checkpoint."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
SENTENCES = [
    "Once upon a time there was a little fox who lived in the deep green wood.",
    "the the the fox fox and and the hen hen said said hello hello world world",
    "naïve café über 東京 你好 🙂",
] * 4


def write_tokenizer(directory: Path, inner: Tokenizer, **config: Any) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; None leaves a key out."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    inner.save(str(directory / "tokenizer.json"))
    kept = {key: value for key, value in named.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return directory


def _trained(inner: Tokenizer, alphabet: list[str], size: int) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(SENTENCES, trainer)
    return inner


@cache
def _byte_level() -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return str(_trained(inner, pre_tokenizers.ByteLevel.alphabet(), 340).to_str())


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: each byte is a letter, so a character may be several tokens."""
    return Tokenizer.from_str(_byte_level())


@cache
def _sentence_piece() -> str:
    """BPE of characters with a token for each byte, which `BpeTrainer` does not make: they are put before the learnt ones."""
    learnt = Tokenizer(models.BPE(unk_token="<unk>"))
    learnt.normalizer = normalizers.Replace(" ", "\u2581")
    ascii_only = [text.encode("ascii", "ignore").decode() for text in SENTENCES]
    learnt.train_from_iterator(
        ascii_only, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    model = json.loads(learnt.to_str())["model"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if token not in SPECIAL]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {token: place for place, token in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    return str(inner.to_str())


def sentence_piece() -> Tokenizer:
    """As Llama 2, Mistral and Gemma: words begin with U+2581, rare characters fall back to bytes, the text's first space is dropped."""
    return Tokenizer.from_str(_sentence_piece())


@cache
def _meta_space() -> str:
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    return str(_trained(inner, [chr(code) for code in range(32, 127)], 200).to_str())


def meta_space() -> Tokenizer:
    """As older conversions: U+2581 without bytes; what is not in the alphabet is unknown."""
    return Tokenizer.from_str(_meta_space())


FORMS = {"byte_level": byte_level, "sentence_piece": sentence_piece, "meta_space": meta_space}


class ByteTokens:
    """A vocabulary of bytes, and an end, as llguidance asks for it."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTE_VOCABULARY = LLTokenizer(TokenizerWrapper(ByteTokens()), slices=[])  # type: ignore[arg-type]
