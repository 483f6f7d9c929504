"""Translates the vocabulary of a GGUF file into a tokenizer.json and a tokenizer_config.json.

`gpt2` is a byte-level BPE with merges, whose text is split by a regular expression that the file names
(`tokenizer.ggml.pre`); `llama` is a sentencepiece BPE with scores and tokens for single bytes; `gemma4` is one with merges.
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
_GEMMA_ENDS = frozenset(("<turn|>", "<|tool_response>"))  # of Gemma 4, whose files have one as a token to show
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))  # of gpt-oss, where <|end|> ends a message and not a turn
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek's first tokenizers: letters that have a case, punctuation, the end of a text, and East Asian writing.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f"
    "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57"
    "\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _EAST_ASIAN)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BYTE_LEVEL: Mapping[str, Any] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip
_NAMED_TOKENS: Mapping[str, str] = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level BPE splits text before its merges, as in the tokenizer.json of the models that use it.

    `patterns`: what matches each in turn is a word, and so is what is between; without any, as GPT-2.
    `separates_digits`: each digit is one too. `keeps_words`: a word that is a token is not split. `adds_bos`: texts
    begin with that token unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    separates_digits: bool = False
    normalizes: bool = False
    keeps_words: bool = False
    adds_bos: bool = False


def _cased(contractions: str, digits: str) -> str:
    """Return the pattern of the tokenizers that separate words where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}[{_UPPER}]*[{_LOWER}]+{contractions}|{start}[{_UPPER}]+[{_LOWER}]*{contractions}"
    return rf"{words}|\p{{N}}{digits}|{_CASED_TAIL}"


SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "olmo": _Split(normalizes=True),
    "smollm": _Split(separates_digits=True),
    "refact": _Split(separates_digits=True),
    "starcoder": _Split(separates_digits=True),
    "command-r": _Split(separates_digits=True, normalizes=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"),
        _Split((_LLAMA3,), keeps_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split((_QWEN2,), normalizes=True)),
    "qwen35": _Split((_QWEN35,), normalizes=True),
    "tekken": _Split((_cased("", ""),), keeps_words=True, adds_bos=True),
    "gpt-4o": _Split((_cased(f"{_CONTRACTIONS}?", "{1,3}"),)),
    "seed-coder": _Split((_SEED,)),
    "deepseek-llm": _Split(_DEEPSEEK_LLM, separates_digits=True),
    "deepseek-coder": _Split(_DEEPSEEK_CODER, separates_digits=True),
    "deepseek-v3": _Split(_DEEPSEEK_V3),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The content of a tokenizer.json and of a tokenizer_config.json, and the ids of the tokens that end a completion."""

    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]


def convert_tokenizer(model: GgufModel) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file, with its chat template. Raises `CheckpointInvalid` if it has none."""
    return _TokenizerConverter(model).convert()


def check_tokenizer(model: GgufModel) -> None:
    """Raise `CheckpointInvalid` unless a GGUF file has a tokenizer of a known kind."""
    _TokenizerConverter(model)


class _TokenizerConverter:
    """The vocabulary of one file: tokens by id, and their types."""

    def __init__(self, model: GgufModel) -> None:
        name = model.file.name
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in model.metadata.items()}
        self._name, self._read, self._metadata = name, ConfigReader(own, f"{name}: tokenizer.ggml"), model.metadata
        self._kind = self._read.text("model", "")
        if self._kind not in ("gpt2", "llama", "gemma4"):
            said = f"a tokenizer of kind {self._kind[:40]!r}" if self._kind else "no tokenizer"
            raise CheckpointInvalid(
                f"{name} has {said}; supported are 'gpt2' (byte-level BPE), 'llama' (scores) and 'gemma4'."
            )
        self.tokens = self._texts("tokens")
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise CheckpointInvalid(f"{name}: tokenizer.ggml.tokens is empty or has a token twice.")
        self.types = self._optional("token_type", int, len(self.tokens)) or (1,) * len(self.tokens)
        self._split = self._find_split() if self._kind == "gpt2" else None
        self._refuse("remove_extra_whitespaces", "removing spaces before texts are tokenized")
        self._refuse("add_sep_token", "a separator after texts")
        self._refuse("precompiled_charsmap", "a table of replaced characters")

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
        if self._kind == "gemma4":
            ids |= {place for place, token in enumerate(self.tokens) if token in _GEMMA_ENDS}
        if ends >= _HARMONY_ENDS:
            ends -= {"<|end|>"}
        return frozenset(ids | {control[token] for token in ends})

    def _find_split(self) -> _Split:
        name = self._read.text("pre", "")
        if name == "default":
            raise CheckpointInvalid(
                f"{self._name}: tokenizer.ggml.pre is 'default': the program that wrote the file did not know how its tokenizer"
                " splits text, so that other programs guess. Convert the model again."
            )
        if name not in SPLITS:
            raise CheckpointInvalid(
                f"{self._name}: tokenizer.ggml.pre is {name[:40]!r}, which says how text is split; supported are "
                f"{', '.join(SPLITS)}. Files made before April 2024 lack it: convert the model again."
            )
        return SPLITS[name]

    def _byte_level(self, split: _Split) -> dict[str, Any]:
        merges = self._merges()
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in split.patterns
        ]
        if split.separates_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps.append({**_BYTE_LEVEL, "use_regex": not split.patterns})
        return {
            "normalizer": {"type": "NFC"} if split.normalizes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": _BYTE_LEVEL,
            "model": self._bpe(merges, ignore_merges=split.keeps_words),
        }

    def _scored(self) -> dict[str, Any]:
        """Return a sentencepiece BPE: the pair whose joined token has the highest score is merged first, or as listed."""
        scores = self._optional("scores", float, len(self.tokens))
        is_listed = self._kind == "gemma4"
        if scores is None and not is_listed:
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.scores are missing.")
        merges = self._merges() if is_listed or scores is None else self._merges_of_scores(scores)
        prefix = self._read.boolean("add_space_prefix", not is_listed)
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
        model = self._bpe(merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }

    def _merges(self) -> list[list[str]]:
        """Return the listed pairs, of which the first token may begin with a space. Raises `CheckpointInvalid`."""
        merges = [
            [merge[:1] + first, second]
            for merge in self._texts("merges")
            for first, _, second in [merge[1:].partition(" ")]
        ]
        if not all(first and second and " " not in second for first, second in merges):
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.merges must be pairs of tokens with a space.")
        return merges

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
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": place, "content": token, "special": kind != _USER, **flags}
            for place, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER) and token
        ]

    def _template(self, first: str | None, last: str | None) -> dict[str, Any] | None:
        tokens = [token for token in (first, last) if token is not None]
        if not tokens:
            return None
        single, second = _with_ends(first, "A", 0, last), _with_ends(first, "B", 1, last)
        ids = {token: {"id": token, "ids": [self.tokens.index(token)], "tokens": [token]} for token in tokens}
        return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": ids}

    def _refuse(self, key: str, what: str) -> None:
        if self._read.values.get(key):
            raise CheckpointInvalid(f"{self._name}: tokenizer.ggml.{key} asks for {what}, which is not offered.")

    def _named(self, key: str) -> str | None:
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


def _with_ends(first: str | None, name: str, segment: int, last: str | None) -> list[dict[str, Any]]:
    parts = [("SpecialToken", first), ("Sequence", name), ("SpecialToken", last)]
    return [{kind: {"id": what, "type_id": segment}} for kind, what in parts if what is not None]
