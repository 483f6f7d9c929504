"""The checkpoint's tokenizer: text to ids and back. Any thread may use it: it does not change after loading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from app.errors import CheckpointInvalid, InvalidRequest
from app.messages import Text
from app.text.bounds import (
    BYTE_TOKEN,
    CHUNK_CHARACTERS,
    META_SPACE,
    UNBOUNDED,
    EncodingLimits,
    LeastTokens,
    TextBounds,
    batches,
    num_characters,
)
from app.text.child_process import ConvertRustErrors, stop_if_cancelled
from app.text.tokenizer_files import TokenizerFiles, apply_other_files, named_tokens, read_tokenizer_files

_CANNOT_ENCODE = "this checkpoint's tokenizer cannot encode the text"
_REPLACEMENT = "\ufffd"
_JOINING_DECODERS = frozenset(("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"))


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token, and the characters [start, stop) of the text that it stands for; None if it stands for none."""

    token_id: int
    start: int | None = None
    stop: int | None = None


class Tokenizer:
    """The tokenizer of a checkpoint's directory or GGUF file.

    `bos_token_id` is None if the checkpoint has none. Each of `eos_token_ids` ends a completion. `lowercases`: texts
    are lowercased first, except for special tokens in them, as some encoders were trained.
    """

    def __init__(self, location: Path, lowercases: bool = False, files: TokenizerFiles | None = None) -> None:
        """Load the tokenizer; `files` are the location's, if they were read already."""
        files = files or read_tokenizer_files(location)
        self._inner = _load(files)
        if lowercases:
            before = [] if self._inner.normalizer is None else [self._inner.normalizer]
            self._inner.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *before])
        self.config: Mapping[str, Any] = files.config
        self._returns_segments = files.has_segments
        self.named_tokens: Mapping[str, str] = MappingProxyType(named_tokens(self.config))
        self._added = {
            token_id: str(token.content) for token_id, token in self._inner.get_added_tokens_decoder().items()
        }
        self._pieces: dict[int, str | None] = {}
        self._special = frozenset(i for i, token in self._inner.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self.token_id(self.named_tokens.get("bos_token"))
        own = self.token_id(self.named_tokens.get("eos_token"))
        self.eos_token_ids = files.eos_token_ids | (frozenset() if own is None else {own})

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._inner.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary has it; empty for an id outside of it."""
        return self._inner.id_to_token(token_id) or ""

    def least_tokens(self, text: str, limit: int) -> int:
        """Return the least number of tokens of the text, without special tokens; 0: nothing is known.

        The count ends soon after `limit`; see `app/text/bounds.py`.
        """
        return self._bounds.least_tokens(text, limit)

    def new_count(self) -> LeastTokens:
        """Return a count for a text that arrives in parts. The first call takes up to some tenths of a second."""
        return self._bounds.new_count()

    @cached_property
    def _bounds(self) -> TextBounds:
        return TextBounds(self._inner, _BYTE_OF_CHARACTER)

    def encode(self, text: str, add_special_tokens: bool = True, limits: EncodingLimits = UNBOUNDED) -> list[int]:
        """Return the token ids of a text, incomplete after `limits.enough_tokens`.

        The post-processor of tokenizer.json decides which special tokens are added, as in transformers. The library's
        batch call lets other threads run meanwhile, unlike the single call.

        Raises `InvalidRequest` if the text is not valid Unicode, or exceeds the limits.
        """
        _check_unicode(text)
        if len(text) > CHUNK_CHARACTERS:
            encoding = self._encode_long(text, limits, "left" if limits.keeps_end else "right")
            with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
                return self._inner.post_process(encoding, None, add_special_tokens).ids
        with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_spans(self, text: str, add_special_tokens: bool, limits: EncodingLimits = UNBOUNDED) -> list[TokenSpan]:
        """Return the tokens of a text with their places in it.

        Special tokens have no place, and neither has any token of a text that is tokenized in chunks. Raises
        `InvalidRequest` if the text is not valid Unicode, or exceeds the limits.
        """
        if len(text) > CHUNK_CHARACTERS:
            return [TokenSpan(token_id) for token_id in self.encode(text, add_special_tokens, limits)]
        _check_unicode(text)
        with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
            encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        places = zip(encoding.ids, encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [TokenSpan(token_id) if added else TokenSpan(token_id, *ends) for token_id, added, ends in places]

    def encode_texts(
        self,
        inputs: Sequence[str | tuple[str, str]],
        max_tokens: int | None = None,
        truncate_left: bool = False,
        limits: EncodingLimits = UNBOUNDED,
    ) -> list[Text]:
        """Tokenize an encoder's texts or pairs of texts, with special tokens and segments.

        Texts of more than `max_tokens` are truncated between their special tokens; of a pair, the longer text first. A
        text with more tokens than `limits` allow may be returned incomplete. Segments are empty if all are 0, or if
        transformers' tokenizer of this checkpoint returns none: by `model_input_names` in tokenizer_config.json, or its
        class. Raises `InvalidRequest` if a text is not valid Unicode, or exceeds the limits.
        """
        for one in inputs:
            for text in (one,) if isinstance(one, str) else one:
                _check_unicode(text)
        side = "left" if truncate_left else "right"
        found: list[Text] = []
        for batch in batches(inputs):
            stop_if_cancelled()
            if len(batch) == 1 and num_characters(batch[0]) > CHUNK_CHARACTERS:
                encodings = [self._encode_long_input(batch[0], max_tokens, side, limits)]
            else:
                with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
                    encodings = self._inner.encode_batch_fast(batch)
                    if max_tokens is not None:
                        for place, one in enumerate(batch):
                            if len(encodings[place]) > max_tokens:
                                encodings[place] = self._truncate(one, max_tokens, side)
            found += map(self._to_text, encodings)
        return found

    def first_tokens(self, text: str, max_tokens: int, limits: EncodingLimits = UNBOUNDED) -> str:
        """Return the part of a text that its first `max_tokens` tokens stand for, without special tokens; 0: all.

        A long text is read until it has enough tokens.
        """
        if not max_tokens:
            return text
        _check_unicode(text)
        whole = [(0, len(text))]
        for start, end in whole if len(text) <= CHUNK_CHARACTERS else self._bounds.chunks(text):
            stop_if_cancelled()
            limits.check(text[start:end])
            with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
                (encoding,) = self._inner.encode_batch([text[start:end]], add_special_tokens=False)
            if len(encoding) > max_tokens:
                return text[: start + encoding.offsets[max_tokens][0]]
            max_tokens -= len(encoding)
            if not max_tokens:
                return text[:end]
        return text

    def _to_text(self, encoding: tokenizers.Encoding) -> Text:
        type_ids = encoding.type_ids
        return Text(tuple(encoding.ids), tuple(type_ids) if self._returns_segments and any(type_ids) else ())

    def _truncate(self, one: str | tuple[str, str], max_tokens: int, side: str) -> tokenizers.Encoding:
        segments = [one] if isinstance(one, str) else list(one)
        return self._join(self._inner.encode_batch_fast(segments, add_special_tokens=False), max_tokens, side)

    def _encode_long_input(
        self, one: str | tuple[str, str], max_tokens: int | None, side: str, limits: EncodingLimits
    ) -> tokenizers.Encoding:
        """Return the encoding of a text or a pair, each part tokenized in chunks.

        Of a single text that is truncated, only the chunks that matter are tokenized. Of a pair all are: the lengths of
        both parts decide what is kept.
        """
        if isinstance(one, str):
            enough = limits.enough_tokens if max_tokens is None else max_tokens
            parts = [self._encode_long(one, replace(limits, enough_tokens=enough), side)]
        else:
            parts = [self._encode_long(text, limits, side) for text in one]
        return self._join(parts, max_tokens, side)

    def _join(self, encodings: list[tokenizers.Encoding], max_tokens: int | None, side: str) -> tokenizers.Encoding:
        if max_tokens is not None:
            room = max(0, max_tokens - self._inner.num_special_tokens_to_add(len(encodings) == 2))
            lengths = truncated_lengths([len(encoding) for encoding in encodings], room)
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length, direction=side)
        with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
            return self._inner.post_process(encodings[0], encodings[1] if len(encodings) == 2 else None)

    def _encode_long(self, text: str, limits: EncodingLimits, side: str = "right") -> tokenizers.Encoding:
        """Return the encoding of a text without special tokens, made chunk by chunk, from the side that is kept.

        It ends with the chunk that reaches `limits.enough_tokens`.
        """
        text = self._bounds.shorten(text)
        ranges, from_end = list(self._bounds.chunks(text)), side == "left"
        encodings, num_tokens = [], 0
        for start, end in reversed(ranges) if from_end else ranges:
            stop_if_cancelled()
            limits.check(text[start:end])
            with ConvertRustErrors(InvalidRequest, _CANNOT_ENCODE):
                encodings += self._inner.encode_batch_fast([text[start:end]], add_special_tokens=False)
            num_tokens += len(encodings[-1])
            if limits.enough_tokens is not None and num_tokens >= limits.enough_tokens:
                break
        return tokenizers.Encoding.merge(encodings[::-1] if from_end else encodings)

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Texts of the tokens that were added to the vocabulary, special or not, by id."""
        return self._added

    @property
    def special_tokens(self) -> Mapping[int, str]:
        return {token_id: self._added[token_id] for token_id in self._special}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids in [0, 2^32); ids outside the vocabulary have no text."""
        with ConvertRustErrors(InvalidRequest, "this checkpoint's tokenizer cannot decode the ids"):
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """Return the text that a token adds after any other complete text; None if that depends on more than the token.

        Special tokens and ids outside the vocabulary have none, nor have parts of characters.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            self._pieces[token_id] = piece = self._find_piece(token_id) if self.has_text(token_id) else None
            return piece

    def _find_piece(self, token_id: int) -> str | None:
        if self._anchor is None:
            return None
        before = self.decode([self._anchor])
        text = self.decode([self._anchor, token_id])
        return text[len(before) :] if text.startswith(before) and _REPLACEMENT not in text else None

    @cached_property
    def _anchor(self) -> int | None:
        """A token with text, if the decoder joins the texts of tokens; it may change the first one."""
        decoder = self._inner.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        parts = [state, *state.get("decoders", ())]
        if not self._decoder_kinds or not self._decoder_kinds <= _JOINING_DECODERS:
            return None
        if any(part.get("stop") for part in parts):  # it changes the last one too
            return None
        ids = self._inner.encode("a", add_special_tokens=False).ids
        return ids[0] if ids and self.has_text(ids[0]) and _REPLACEMENT not in self.decode(ids[:1]) else None

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens and for ids beyond the vocabulary, which decode to nothing.

        An embedding may have more rows than the vocabulary has ids.
        """
        return token_id not in self._special and self._inner.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text, maybe a part of a character; names of special tokens."""
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self._inner.id_to_token(token_id) or ""
        if "ByteLevel" in self._decoder_kinds:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        byte = BYTE_TOKEN.match(token) if "ByteFallback" in self._decoder_kinds else None
        return bytes([int(byte.group(1), 16)]) if byte else token.replace(META_SPACE, " ").encode()

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        decoder = self._inner.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        return frozenset(part["type"] for part in [state, *state.get("decoders", ())] if "type" in part)


def truncated_lengths(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Return the truncated lengths of one or two texts that together may have `max_tokens` tokens.

    The longer text is shortened until both are equally long, then both are.
    """
    if len(lengths) == 1 or sum(lengths) <= max_tokens:
        return [min(length, max_tokens) for length in lengths]
    first, second = lengths
    half = max_tokens // 2
    if min(first, second) > half:
        return [half + max_tokens % 2, half] if first > second else [half, half + max_tokens % 2]
    return [max_tokens - second, second] if first > second else [first, max_tokens - first]


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: there is a lone surrogate at character {error.start}."
        ) from error


def _load(files: TokenizerFiles) -> tokenizers.Tokenizer:
    with ConvertRustErrors(
        CheckpointInvalid,
        f"{files.origin} is not a tokenizer that the tokenizers library {tokenizers.__version__} can read",
    ):
        inner = tokenizers.Tokenizer.from_str(files.tokenizer)
    inner.no_truncation()  # some checkpoints keep both from training; a prompt must never be truncated silently
    inner.no_padding()
    apply_other_files(inner, files)
    return inner


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet as character to byte.

    Printable bytes represent themselves; the others are mapped to the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
