"""Bounds on tokenization that are known before a token exists: the least number of tokens, and where to cut a text.

The tokenizers library takes 130 to 160 bytes of memory and up to a microsecond of one core for each byte of text. A
text is therefore compared with the context first, and a long one is tokenized in chunks where that changes nothing.

**The least number of tokens.** Each byte b of a text has a weight: 1 / L(b), where L(b) is the number of bytes of the
longest token that contains b. A token of n bytes has only bytes with L ≥ n, so the weights of its bytes add up to at
most 1, and a text has at least as many tokens as the sum of its weights. A text that fits is never refused. A byte that
can vanish, or can be one token with any number of others, has weight 0:

- white space, if the pre-tokenizer drops it or an added token strips it (`lstrip`, `rstrip`);
- characters outside the vocabulary, if unknown characters are dropped or joined into one token;
- control characters, if a normalizer removes them;
- everything but isolated punctuation in a vocabulary of words, where a word of any length may be one unknown token.

Normalizers that change other characters (NFC, NFKC, lower case) map ASCII to ASCII one to one, so texts in ASCII are
weighed and others are not. With a normalizer or pre-tokenizer that is not in the tables, no text is weighed.

**Cuts.** Where the pre-tokenizer makes each word on its own, the tokens of a text are those of its chunks, cut at a
space between two ASCII letters or digits. Neither a normalizer nor an added token reaches across such a space if no
added token contains white space. BERT's pre-tokenizer also splits after each mark of punctuation.
"""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import tokenizers
from numpy.typing import NDArray

from app.errors import InvalidRequest

# Characters in a chunk. Its tokens take some 10 MB while they are made.
CHUNK_CHARACTERS = 64 * 1024
# Bytes weighed in one call of numpy, in about 50 µs.
_BLOCK_BYTES = 32 * 1024
# The largest error of a sum of 2^24 rounded weights is far smaller.
_ROUNDING = 1e-3
META_SPACE = "\u2581"  # a space in a sentencepiece vocabulary
BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")  # a byte in a byte-fallback vocabulary
_WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\n\r")) + b"\x7f"
_PUNCTUATION = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_ALPHANUMERIC = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

# Normalizers that keep every character.
_IDENTITY = frozenset({"Prepend", "Append"})
# Normalizers that keep every character of an ASCII text, but for its case and control characters.
_IDENTITY_ON_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "BertNormalizer"})
# Pre-tokenizers that keep every character.
_LOSSLESS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength", "Punctuation", "Split"})
# Pre-tokenizers that split at white space and drop it.
_DROPPING = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_SPACE_CUT = r"(?<=[0-9A-Za-z]) (?=[0-9A-Za-z])"
_ENDS = "!?;,."  # punctuation after which BERT's pre-tokenizer always splits

Stage = Mapping[str, Any]
Input = str | tuple[str, str]  # a text or a pair


@dataclass(frozen=True, slots=True)
class EncodingLimits:
    """Bounds on the work for one text.

    One call of the library may take `max_bytes`. A text in chunks need not be continued after `enough_tokens`, from its
    beginning, or from its end with `keeps_end`.
    """

    max_bytes: int = sys.maxsize
    enough_tokens: int | None = None
    keeps_end: bool = False

    def check(self, chunk: str) -> None:
        """Raise `InvalidRequest` if tokenizing the chunk takes more memory than one text may have."""
        num_bytes = len(chunk.encode())
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the text has {num_bytes} bytes that must be tokenized at once, and this server's memory allows "
                f"{self.max_bytes}: send less text."
            )


UNBOUNDED = EncodingLimits()


def num_characters(one: Input) -> int:
    return len(one) if isinstance(one, str) else sum(map(len, one))


def batches(inputs: Sequence[Input]) -> Iterator[list[Input]]:
    """Yield the inputs in groups of at most `CHUNK_CHARACTERS` characters, or of one input."""
    batch: list[Input] = []
    size = 0
    for one in inputs:
        length = num_characters(one)
        if batch and size + length > CHUNK_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += length
    if batch:
        yield batch


class LeastTokens:
    """Least number of tokens of a text, without special tokens, counted part by part.

    `weights` of each byte are None if nothing is known. With `ascii_only` only texts in ASCII are weighed.
    """

    def __init__(self, weights: NDArray[numpy.float64] | None, ascii_only: bool) -> None:
        self._weights, self._ascii_only, self._total = weights, ascii_only, 0.0

    def add(self, part: bytes) -> None:
        """Count the text's next bytes; a character may be divided between two parts."""
        if self._ascii_only and not part.isascii():
            self._weights, self._total = None, 0.0
        if self._weights is not None:
            self._total += float(self._weights[numpy.frombuffer(part, numpy.uint8)].sum())

    def exceeds(self, limit: int) -> bool:
        """Return True if the text has more than `limit` tokens, whatever follows these parts."""
        # One token more: a mark that follows may be composed with the last letter.
        return self._total > limit + 1 + _ROUNDING

    @property
    def tokens(self) -> int:
        """Least number of tokens of these parts; 0: nothing is known."""
        return max(math.ceil(self._total - _ROUNDING), 0)


class TextBounds:
    """Weights and cuts of one tokenizer. `byte_of_character` is GPT-2's byte-level alphabet."""

    def __init__(self, inner: tokenizers.Tokenizer, byte_of_character: Mapping[str, int]) -> None:
        self._inner, self._byte_of_character = inner, byte_of_character
        self._normalizers = _stages(inner.normalizer, "normalizers")
        self._pre_tokenizers = _stages(inner.pre_tokenizer, "pretokenizers")
        self._model = type(inner.model).__name__
        self._added = list(inner.get_added_tokens_decoder().values())
        self._kinds = [stage["type"] for stage in self._pre_tokenizers]
        self._is_byte_level = "ByteLevel" in self._kinds
        self._ascii_only = any(stage["type"] in _IDENTITY_ON_ASCII for stage in self._normalizers)
        self._weights = self._make_weights()
        self._keeps_space = self._kinds == ["ByteLevel"]
        self._cut = self._cut_pattern()
        self._long_word = self._long_word_pattern()

    def least_tokens(self, text: str, limit: int) -> int:
        """Return the least number of tokens of the text, without special tokens; 0: nothing is known.

        The count ends soon after `limit`.
        """
        if self._ascii_only and not text.isascii():
            return 0
        count = self.new_count()
        # Encoded by blocks too: a text that is refused after its first block is not copied.
        for start in range(0, len(text), _BLOCK_BYTES):
            count.add(text[start : start + _BLOCK_BYTES].encode(errors="surrogatepass"))
            if count.exceeds(limit):
                break
        return count.tokens

    def new_count(self) -> LeastTokens:
        return LeastTokens(self._weights, self._ascii_only)

    def chunks(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the ranges of characters of the chunks, in order.

        A chunk is longer than `CHUNK_CHARACTERS` if it has no cut, and the text is one chunk if the tokenizer has none.
        """
        start, size = 0, len(text)
        while self._cut is not None and size - start > CHUNK_CHARACTERS:
            found = self._next_cut(self._cut, text, start + CHUNK_CHARACTERS)
            if found is None:
                break
            yield start, found.start()
            start = found.start() if self._keeps_space else found.end()
        yield start, size

    def shorten(self, text: str) -> str:
        """Return a text with the same tokens, in which no run of ASCII letters and digits is needlessly long.

        A vocabulary of word pieces has one unknown token for each word beyond its limit. So only the limit's characters
        of a longer run matter, and one more.
        """
        if self._long_word is None:
            return text
        blocks = (text[start : start + CHUNK_CHARACTERS] for start in range(0, len(text), CHUNK_CHARACTERS))
        return "".join(self._long_word.sub(r"\1", block) for block in blocks)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _make_weights(self) -> NDArray[numpy.float64] | None:
        """Return the weight of each byte, or None if nothing is known of this tokenizer."""
        if not all(map(_keeps_text, self._normalizers)) or not all(map(_is_known_splitter, self._pre_tokenizers)):
            return None
        in_words = self._model in ("WordPiece", "WordLevel")
        if not in_words and self._model not in ("BPE", "Unigram"):
            return None
        lowercases = any(one["type"] == "Lowercase" or one.get("lowercase") for one in self._normalizers)
        longest = self._longest_tokens(in_words)
        if lowercases:
            for upper in range(ord("A"), ord("Z") + 1):
                longest[upper] = max(longest[upper], longest[upper + 32])
        weights: NDArray[numpy.float64] = 1.0 / numpy.maximum(longest, 4.0)  # an unknown character has up to 4 bytes
        weights[sorted(self._weightless(in_words, lowercases))] = 0.0
        return weights

    def _longest_tokens(self, in_words: bool) -> NDArray[numpy.float64]:
        """Return for each byte the length of the longest token that contains it."""
        vocabulary = [] if in_words else [self._token_spellings(token) for token in self._inner.get_vocab(False)]
        vocabulary += [_forms(token.content) for token in self._added]
        spellings = sorted((one for token in vocabulary for one in token), key=len, reverse=True)
        longest, seen = numpy.zeros(256), b""
        for spelling in spellings:
            new = spelling.translate(None, seen)
            if new:
                longest[list(set(new))] = len(spelling)
                seen += bytes(set(new))
        return longest

    def _token_spellings(self, token: str) -> tuple[bytes, ...]:
        """Return the texts that a token may stand for. U+2581 stands for a space or for itself."""
        if self._is_byte_level:
            values = [self._byte_of_character.get(character) for character in token]
            return (token.encode() if None in values else bytes(value for value in values if value is not None),)
        spelled = token.encode()
        if (byte := BYTE_TOKEN.match(token)) is not None:
            return (spelled, bytes([int(byte[1], 16)]))
        # The space is added in front, so that both of its forms get the length of the longer one.
        return (b" " * (META_SPACE in token) + spelled,)

    def _weightless(self, in_words: bool, lowercases: bool) -> set[int]:
        """Return the bytes that a text may have in any number without more tokens."""
        none: set[int] = set()
        if in_words:
            none |= set(range(256)) - (set(_PUNCTUATION) if "BertPreTokenizer" in self._kinds else set())
        else:
            none |= self._unknown_bytes(lowercases)
        drops = any(kind in _DROPPING for kind in self._kinds)
        if drops or any(token.lstrip or token.rstrip for token in self._added):
            none |= set(_WHITE_SPACE.encode())
        if any(one["type"] in ("Nmt", "BertNormalizer") for one in self._normalizers):
            none |= set(_CONTROLS)
        return none

    def _unknown_bytes(self, lowercases: bool) -> set[int]:
        """Return the bytes of characters that may be unknown to the vocabulary, and so dropped or joined."""
        token_id = self._inner.token_to_id
        if self._is_byte_level:
            return {byte for character, byte in self._byte_of_character.items() if token_id(character) is None}
        fallback = getattr(self._inner.model, "byte_fallback", False)
        if fallback and all(token_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
            return set()
        letters = {byte: chr(byte).lower() if lowercases else chr(byte) for byte in range(128)}
        known = {
            byte
            for byte, character in letters.items()
            if token_id(META_SPACE if character == " " and self._spells_meta_space else character) is not None
        }
        return set(range(256)) - known

    @property
    def _spells_meta_space(self) -> bool:
        return "Metaspace" in self._kinds or any(_is_meta_space_rule(one) for one in self._normalizers)

    # ---- cuts --------------------------------------------------------------------------------------------------------

    def _cut_pattern(self) -> re.Pattern[str] | None:
        """Return the pattern of the places where a text may be cut, or None if there are none.

        The space of a cut begins the next chunk if the pre-tokenizer keeps it, else it belongs to none.
        """
        normalizers = {one["type"] for one in self._normalizers if not _is_meta_space_rule(one)}
        if normalizers & {"Prepend", "Append"} or not normalizers <= _IDENTITY_ON_ASCII | {
            "Strip",
            "Precompiled",
            "Replace",
        }:
            return None
        if any(set(token.content) & set(_WHITE_SPACE) for token in self._added):
            return None
        if any(
            one["type"] == "Replace" and not _joins_spaces(one)
            for one in self._normalizers
            if not _is_meta_space_rule(one)
        ):
            return None
        first = self._pre_tokenizers[0] if self._pre_tokenizers else {"type": ""}
        strips = any(token.rstrip for token in self._added)
        if self._kinds == ["ByteLevel"]:
            can_cut = first.get("use_regex", True) and not strips and not self._spells_meta_space
        elif self._kinds == ["Metaspace"]:
            can_cut = first.get("split", True) and first.get("prepend_scheme") == "always"
        else:
            can_cut = first["type"] in _DROPPING
        if not can_cut:
            return None
        added = {character for token in self._added for character in token.content}
        ends = "".join(end for end in _ENDS if end not in added)
        isolates = first["type"] == "BertPreTokenizer" and ends
        return re.compile(_SPACE_CUT + (rf"|(?<=[{ends}])(?=[!-~])" if isolates else ""))

    def _next_cut(self, pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
        """Return the next cut. It is searched by windows: a search holds the interpreter."""
        for begin in range(start, len(text), CHUNK_CHARACTERS):
            if found := pattern.search(text, begin, begin + CHUNK_CHARACTERS + 2):
                return found
        return None

    def _long_word_pattern(self) -> re.Pattern[str] | None:
        """Return the pattern of a run that is longer than a word may be; None if every character may matter."""
        if (
            self._model != "WordPiece"
            or self._kinds != ["BertPreTokenizer"]
            or not all(map(_keeps_text, self._normalizers))
        ):
            return None
        most = int(self._inner.model.max_input_chars_per_word)
        for token in self._added:
            ends = {token.content[:1], token.content[-1:]}
            if len(token.content) > most or ends & _ALPHANUMERIC or token.single_word:
                return None
        return re.compile(rf"([0-9A-Za-z]{{{most + 1}}})[0-9A-Za-z]+")


def _stages(component: Any, name: str) -> list[Stage]:
    """Return the steps of a normalizer or pre-tokenizer, with nested sequences as one list."""
    if component is None:
        return []
    return list(_flat(json.loads(component.__getstate__()), name))


def _flat(state: Stage, name: str) -> Iterator[Stage]:
    if state.get("type") == "Sequence":
        for one in state[name]:
            yield from _flat(one, name)
    else:
        yield state


def _keeps_text(normalizer: Stage) -> bool:
    return normalizer["type"] in _IDENTITY | _IDENTITY_ON_ASCII or _is_meta_space_rule(normalizer)


def _is_meta_space_rule(normalizer: Stage) -> bool:
    return normalizer["type"] == "Replace" and (normalizer["pattern"], normalizer["content"]) == (
        {"String": " "},
        META_SPACE,
    )


def _forms(content: str) -> tuple[bytes, ...]:
    """Return the texts, as far as they matter here, that an added token matches before or after normalization."""
    compatible = unicodedata.normalize("NFKC", content)
    forms = {content, content.lower(), compatible, compatible.lower()}
    most = max(len(form.encode()) for form in forms)
    return tuple(form.encode().rjust(most) if form else b"" for form in forms)


def _joins_spaces(normalizer: Stage) -> bool:
    """Return True for the rule of XLM-RoBERTa and T5 that makes one space of several."""
    return bool(normalizer["pattern"] == {"Regex": " {2,}"})


def _is_known_splitter(pre_tokenizer: Stage) -> bool:
    kind = pre_tokenizer["type"]
    if kind == "Metaspace" and pre_tokenizer.get("replacement") != META_SPACE:
        return False
    return kind in _DROPPING or (kind in _LOSSLESS and pre_tokenizer.get("behavior") != "Removed")
