"""Translates the vocabulary of a GGUF file into a tokenizer.json and a tokenizer_config.json.

Two kinds are known: `gpt2`, a byte-level BPE with merges whose text is split by a regular expression that the file names
(`tokenizer.ggml.pre`), and `llama`, a sentencepiece BPE with scores and tokens for single bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.gguf.reader import GgufModel

_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5  # llama_token_type
_META_SPACE = "\u2581"  # a space in a sentencepiece vocabulary
_MAX_TOKEN_CHARACTERS = 2**10
# Control tokens that end a turn, by the models that have them. A file names only one end of text.
_TURN_ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> <|return|> <|call|>".split()
)
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))  # of gpt-oss, where <|end|> ends a message and not a turn
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level BPE splits text before its merges, as in the tokenizer.json of the models that use it.

    Without `pattern` it is GPT-2's. `keeps_words`: a word that is a token is not split. `adds_bos`: texts begin with the
    beginning-of-text token if the file does not say otherwise.
    """

    pattern: str = ""
    separates_digits: bool = False
    normalizes: bool = False
    keeps_words: bool = False
    adds_bos: bool = False


_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"


def _cased(contractions: str, digits: str) -> str:
    """Return the pattern of the tokenizers that separate words where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}[{_UPPER}]*[{_LOWER}]+{contractions}|{start}[{_UPPER}]+[{_LOWER}]*{contractions}"
    return rf"{words}|\p{{N}}{digits}|{_CASED_TAIL}"


SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "smollm": _Split(separates_digits=True),
    "llama-bpe": _Split(_LLAMA3, keeps_words=True, adds_bos=True),
    "smaug-bpe": _Split(_LLAMA3),
    "dbrx": _Split(_LLAMA3),
    "glm4": _Split(_LLAMA3),
    "qwen2": _Split(_QWEN2, normalizes=True),
    "deepseek-r1-qwen": _Split(_QWEN2, normalizes=True),
    "tekken": _Split(_cased("", ""), keeps_words=True, adds_bos=True),
    "gpt-4o": _Split(_cased(f"{_CONTRACTIONS}?", "{1,3}")),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The content of a tokenizer.json and of a tokenizer_config.json, and the ids of the tokens that end a completion."""

    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]


def convert_tokenizer(model: GgufModel) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file, with its chat template.

    Raises:
        CheckpointInvalid: The file has no tokenizer, a damaged one, or one of an unknown kind.
    """
    return _TokenizerConverter(model).convert()


def check_tokenizer(model: GgufModel) -> None:
    """Check that a GGUF file has a tokenizer of a known kind.

    Raises:
        CheckpointInvalid: It has none, or another kind.
    """
    _TokenizerConverter(model)


class _TokenizerConverter:
    """The vocabulary of one file: tokens by id, and their types."""

    def __init__(self, model: GgufModel) -> None:
        name = model.file.name
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in model.metadata.items()}
        self._name, self._read, self._metadata = name, ConfigReader(own, f"{name}: tokenizer.ggml"), model.metadata
        self._kind = self._read.text("model", "")
        if self._kind not in ("gpt2", "llama"):
            said = f"a tokenizer of kind {self._kind[:40]!r}" if self._kind else "no tokenizer"
            raise CheckpointInvalid(f"{name} has {said}; supported are 'gpt2' (byte-level BPE) and 'llama' (scores).")
        self.tokens = self._texts("tokens")
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise CheckpointInvalid(f"{name}: tokenizer.ggml.tokens is empty or has a token twice.")
        self.types = self._optional("token_type", int, len(self.tokens)) or (1,) * len(self.tokens)
        self._split = self._find_split() if self._kind == "gpt2" else None

    def _chat_templates(self) -> dict[str, str]:
        """Return the chat templates by their names; `tokenizer.chat_template` alone is the default one."""
        key = "tokenizer.chat_template"
        found = {
            name.removeprefix(f"{key}."): text for name, text in self._metadata.items() if name.startswith(f"{key}.")
        }
        if key in self._metadata:
            found["default"] = self._metadata[key]
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def convert(self) -> GgufTokenizer:
        named = {name: self._named(key) for name, key in _NAMED_TOKENS.items()}
        config: dict[str, Any] = {name: token for name, token in named.items() if token is not None}
        if templates := self._chat_templates():
            config["chat_template"] = templates
        adds_bos = self._split is None or self._split.adds_bos
        added = [
            named["bos_token"] if self._read.boolean("add_bos_token", adds_bos) else None,
            named["eos_token"] if self._read.boolean("add_eos_token", False) else None,
        ]
        state: dict[str, Any] = {"version": "1.0", "added_tokens": self._added_tokens()}
        state |= self._scored() if self._split is None else self._byte_level(self._split)
        state["post_processor"] = self._template(*added)
        return GgufTokenizer(state, config, self._eos_token_ids())

    def _eos_token_ids(self) -> frozenset[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = {self._read.integer(key, at_least=0) for key in keys if self._read.has(key)}
        control = {token: place for place, token in enumerate(self.tokens) if self.types[place] == _CONTROL}
        ends = _TURN_ENDS & control.keys()
        if ends >= _HARMONY_ENDS:
            ends -= {"<|end|>"}
        return frozenset(ids | {control[token] for token in ends})

    def _find_split(self) -> _Split:
        name = self._read.text("pre", "")
        if name not in SPLITS:
            raise CheckpointInvalid(
                f"{self._name}: tokenizer.ggml.pre is {name[:40]!r}, which says how text is split; supported are "
                f"{', '.join(SPLITS)}. Files made before April 2024 lack it: convert the model again."
            )
        return SPLITS[name]

    def _byte_level(self, split: _Split) -> dict[str, Any]:
        merges = [merge.split(" ") for merge in self._texts("merges")]
        if any(len(pair) != 2 for pair in merges):
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.merges must be pairs of tokens with a space.")
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if split.separates_digits else []
        if split.pattern:
            pattern = {"Regex": split.pattern}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        steps.append({**_BYTE_LEVEL, "use_regex": not split.pattern})
        return {
            "normalizer": {"type": "NFC"} if split.normalizes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": _BYTE_LEVEL,
            "model": self._bpe(merges, ignore_merges=split.keeps_words),
        }

    def _scored(self) -> dict[str, Any]:
        """Return a sentencepiece BPE: the pair whose joined token has the highest score is merged first."""
        scores = self._optional("scores", float, len(self.tokens))
        if scores is None:
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.scores are missing.")
        prefix = self._read.boolean("add_space_prefix", True)
        steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _META_SPACE}] if prefix else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _META_SPACE}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _META_SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = next((token for token, kind in zip(self.tokens, self.types, strict=True) if kind == _UNKNOWN), None)
        model = self._bpe(self._merges_of_scores(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }

    def _merges_of_scores(self, scores: Sequence[float]) -> list[list[str]]:
        """Return every way to join two tokens to a third, in descending order of the third's score."""
        ids = {token: place for place, token in enumerate(self.tokens) if self.types[place] not in (_CONTROL, _UNUSED)}
        order = sorted(ids, key=lambda token: (-scores[ids[token]], ids[token]))
        return [
            [token[:at], token[at:]]
            for token in order
            for at in range(1, min(len(token), _MAX_TOKEN_CHARACTERS))
            if token[:at] in ids and token[at:] in ids
        ]

    def _bpe(self, merges: list[list[str]], **options: Any) -> dict[str, Any]:
        vocabulary = {token: place for place, token in enumerate(self.tokens)}
        return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before it is split."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": place, "content": token, "special": kind != _USER, **flags}
            for place, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER) and token
        ]

    def _template(self, first: str | None, last: str | None) -> dict[str, Any] | None:
        """Return the post-processor that adds tokens before and after a text."""
        tokens = [token for token in (first, last) if token is not None]
        if not tokens:
            return None
        single, second = _with_ends(first, "A", 0, last), _with_ends(first, "B", 1, last)
        ids = {token: {"id": token, "ids": [self.tokens.index(token)], "tokens": [token]} for token in tokens}
        return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": ids}

    def _named(self, key: str) -> str | None:
        """Return the token whose id the metadata names, or None."""
        if not self._read.has(key):
            return None
        return self.tokens[self._read.integer(key, at_least=0, at_most=len(self.tokens) - 1)]

    def _texts(self, key: str) -> Sequence[str]:
        values = self._read.values.get(key)
        if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.{key} must be a list of strings.")
        return values

    def _optional(self, key: str, kind: type, length: int) -> Sequence[Any] | None:
        values = self._read.values.get(key)
        if values is None:
            return None
        if not isinstance(values, tuple) or len(values) != length or not all(type(value) is kind for value in values):
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.{key} must be one number for each token.")
        return values


_BYTE_LEVEL: Mapping[str, Any] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip
_NAMED_TOKENS: Mapping[str, str] = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


def _with_ends(first: str | None, name: str, segment: int, last: str | None) -> list[dict[str, Any]]:
    """Return the parts of a post-processor's template for one text, with the tokens that are not None."""
    parts = [("SpecialToken", first), ("Sequence", name), ("SpecialToken", last)]
    return [{kind: {"id": what, "type_id": segment}} for kind, what in parts if what is not None]
