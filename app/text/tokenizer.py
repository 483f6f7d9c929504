"""The checkpoint's tokenizer: text to ids and back, incremental detokenization, and stop strings.

It is read from `tokenizer.json` and `tokenizer_config.json`; conversations are in `chat.py`. Any thread may use a
tokenizer: it does not change after loading. Incremental text never has incomplete characters or anything past a stop
string, and the whole text is never decoded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import tokenizers

from app.errors import ArmatureError, CheckpointInvalid, InvalidRequest
from app.messages import Text

# The named special tokens that chat templates may use, with transformers' names.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")  # a byte in a byte-fallback vocabulary
_CANNOT_ENCODE = "this checkpoint's tokenizer cannot encode the text"
_META_SPACE = "\u2581"  # a space in a sentencepiece vocabulary


class _ConvertBareException:
    """Converts plain `Exception`, which the Rust library raises, into `kind`; other exceptions pass."""

    def __init__(self, kind: type[ArmatureError], sentence: str) -> None:
        self._kind, self._sentence = kind, sentence

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise self._kind(f"{self._sentence}: {error}") from error


class Tokenizer:
    """A checkpoint's tokenizer.

    `bos_token_id` is None if the checkpoint has none. Each of `eos_token_ids` ends a completion. `lowercases`:
    texts are lowercased first, except for special tokens in them, as some encoders were trained.
    """

    def __init__(self, directory: Path, lowercases: bool = False) -> None:
        self._inner = _load(directory / "tokenizer.json")
        if lowercases:
            before = [] if self._inner.normalizer is None else [self._inner.normalizer]
            self._inner.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *before])
        self.config: Mapping[str, Any] = _read_object(directory / "tokenizer_config.json")
        inputs = self.config.get("model_input_names")
        self._returns_segments = not isinstance(inputs, list) or "token_type_ids" in inputs
        self.named_tokens: Mapping[str, str] = MappingProxyType(_named_tokens(self.config))
        self._added = {
            token_id: str(token.content) for token_id, token in self._inner.get_added_tokens_decoder().items()
        }
        self._special = frozenset(i for i, token in self._inner.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self.token_id(self.named_tokens.get("bos_token"))
        self.eos_token_ids = self._read_all_eos_ids(directory)

    def token_id(self, token: str | None) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have it."""
        return None if token is None else self._inner.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        The post-processor of tokenizer.json decides which special tokens are added, as in transformers. The batch
        call of the library is used because it lets other threads run meanwhile, unlike the single call.
        """
        _check_unicode(text)
        with _ConvertBareException(InvalidRequest, _CANNOT_ENCODE):
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_texts(
        self, inputs: Sequence[str | tuple[str, str]], max_tokens: int | None = None, truncate_left: bool = False
    ) -> list[Text]:
        """Tokenize an encoder's texts or pairs of texts in one library call, with special tokens and segments.

        Args:
            inputs: Texts, or pairs of texts.
            max_tokens: Longer texts are truncated between their special tokens; of a pair, the longer text first.
                None: no truncation.
            truncate_left: Truncate at the beginning instead of the end.

        Returns:
            One `Text` per input. Segments are empty if all are 0, or if `model_input_names` in
            tokenizer_config.json leaves them out.
        """
        for one in inputs:
            for text in (one,) if isinstance(one, str) else one:
                _check_unicode(text)
        with _ConvertBareException(InvalidRequest, _CANNOT_ENCODE):
            encodings = self._inner.encode_batch_fast(list(inputs))
            if max_tokens is not None:
                side = "left" if truncate_left else "right"
                for place, one in enumerate(inputs):
                    if len(encodings[place]) > max_tokens:
                        encodings[place] = self._truncate(one, max_tokens, side)
        segments = [tuple(one.type_ids) if self._returns_segments and any(one.type_ids) else () for one in encodings]
        return [Text(tuple(one.ids), type_ids) for one, type_ids in zip(encodings, segments, strict=True)]

    def _truncate(self, one: str | tuple[str, str], max_tokens: int, side: str) -> tokenizers.Encoding:
        segments = [one] if isinstance(one, str) else list(one)
        encodings = self._inner.encode_batch_fast(segments, add_special_tokens=False)
        max_tokens_of_text = max(0, max_tokens - self._inner.num_special_tokens_to_add(len(segments) == 2))
        for encoding, length in zip(
            encodings, truncated_lengths([len(encoding) for encoding in encodings], max_tokens_of_text), strict=True
        ):
            encoding.truncate(length, direction=side)
        return self._inner.post_process(encodings[0], encodings[1] if len(encodings) == 2 else None)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids in [0, 2^32); ids outside the vocabulary have no text."""
        with _ConvertBareException(InvalidRequest, "this checkpoint's tokenizer cannot decode the ids"):
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens and for ids beyond the vocabulary, which decode to nothing.

        An embedding may have more rows than the vocabulary has ids.
        """
        return token_id not in self._special and self._inner.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text, since it may be part of a character.

        Special tokens give their names.
        """
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self._inner.id_to_token(token_id) or ""
        if "ByteLevel" in self._decoder_kinds:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        byte = _BYTE_TOKEN.match(token) if "ByteFallback" in self._decoder_kinds else None
        return bytes([int(byte.group(1), 16)]) if byte else token.replace(_META_SPACE, " ").encode()

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        decoder = self._inner.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        return frozenset(part["type"] for part in [state, *state.get("decoders", ())] if "type" in part)

    def _read_all_eos_ids(self, directory: Path) -> frozenset[int]:
        """Return all end-of-text ids, since instruct checkpoints use any of them.

        They are those of `generation_config.json`, or else of `config.json`, and the tokenizer's `eos_token`.
        """
        ids = _read_eos_ids(directory / "generation_config.json") or _read_eos_ids(directory / "config.json")
        own = self.token_id(self.named_tokens.get("eos_token"))
        return ids if own is None else ids | {own}


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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: there is a lone surrogate at character {error.start}."
        ) from error


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = "Save the tokenizer in its fast form: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        raise CheckpointInvalid(f"{path} is missing. {hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    with _ConvertBareException(
        CheckpointInvalid, f"{path} is not a tokenizer that the tokenizers library {tokenizers.__version__} can read"
    ):
        inner = tokenizers.Tokenizer.from_str(text)
    inner.no_truncation()  # some checkpoints keep both from training; a prompt must never be truncated silently
    inner.no_padding()
    return inner


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens; each is stored as a string or as an object with `content`."""
    entries = {name: config.get(name) for name in _NAMED_TOKENS}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_eos_ids(path: Path) -> frozenset[int]:
    """Return the ids of `eos_token_id` in a config file, which may be one id, a list or absent."""
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointInvalid(f"eos_token_id in {path} must be an id or a list of ids, not {value!r}.")
    return frozenset(ids)


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet as character to byte.

    Printable bytes represent themselves; the others are mapped to the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


_REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are not a character, or not yet

_NARROWED_TOKENS = (
    8,
    7,
    6,
    5,
)  # tokens to keep; at least 5: an incomplete character has at most 3 tokens, which must not be the window's first

_WIDE_TOKENS = 12  # tokens in the window at which it is narrowed

_MAX_WINDOW_TOKENS = 24  # tokens in the window at which bytes that never became a character are shown as U+FFFD

_MAX_PENDING_BYTES = 3  # bytes: at most three of a UTF-8 character's four can be pending


class IncrementalDetokenizer:
    """The text of a growing list of tokens, cut at the first stop string.

    The joined results of `push` and `flush` equal decoding all tokens at once. Each push decodes a window of the
    last tokens, so a token costs the same at any length. `context` are the tokens before the first one: the end of
    the prompt in a completion, so that a sentencepiece decoder keeps the space before the first word; empty in a
    chat, where the answer starts a text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._window = self._context_window(context)
        self._shown = self._context_length()  # characters of the window's text that were already returned

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; no text follows it."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; often empty."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoded()
        certain = len(text.rstrip(_REPLACEMENT))
        if certain < len(text) and len(self._window) >= _MAX_WINDOW_TOKENS:
            certain = max(certain, len(text) - _MAX_PENDING_BYTES)
        new_text = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) >= (_WIDE_TOKENS if certain == len(text) else _MAX_WINDOW_TOKENS):
            self._narrow(text)
        return self._stops.push(new_text)

    def flush(self) -> str:
        """End the tokens and return the text that was held back, with incomplete characters as U+FFFD."""
        rest = self._decoded()[self._shown :]
        self._shown += len(rest)
        shown = self._stops.push(rest)
        return shown + self._stops.flush()

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window)

    def _narrow(self, text: str) -> None:
        """Drop the window's first tokens where the rest decodes to the end of the same text."""
        waiting = len(text) - self._shown
        last_resort = _NARROWED_TOKENS[:1] if len(self._window) >= _MAX_WINDOW_TOKENS else ()
        for place, count in enumerate((*_NARROWED_TOKENS, *last_resort)):
            tail = self._tokenizer.decode(self._window[-count:])
            if place >= len(_NARROWED_TOKENS) or (len(tail) > waiting and text.endswith(tail)):
                self._window = self._window[-count:]
                self._shown = max(len(tail) - waiting, 0)
                return

    def _context_length(self) -> int:
        """Return the number of complete characters in the context.

        The context may end within a character that the next tokens complete.
        """
        text = self._decoded()
        meant = b"".join(map(self._tokenizer.token_bytes, self._window)).endswith(_REPLACEMENT.encode())
        return len(text) if meant else len(text.rstrip(_REPLACEMENT))

    def _context_window(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens of a context that have text, starting at a character boundary if one is found."""
        visible: list[int] = []
        for token_id in reversed(context):
            if len(visible) == _NARROWED_TOKENS[0]:
                break
            if self._tokenizer.has_text(token_id):
                visible.insert(0, token_id)
        ends = (visible[-count:] for count in _NARROWED_TOKENS)
        return next((end for end in ends if _REPLACEMENT not in self._tokenizer.decode(end)), visible)


class StopStrings:
    """A filter that lets text through up to the first complete stop string; the text ends before it.

    If two stop strings end at the same character, the longer one counts. The boundaries between the parts make no
    difference. Each stop string is matched with the Knuth-Morris-Pratt automaton, so a character costs one step per
    stop string, however much text is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._held_back = ""  # not shown yet: the longest suffix of the text that is a prefix of a stop string
        self._stops = [(stop, _prefix_function(stop)) for stop in stops]
        self._progress = [0] * len(stops)  # characters of each stop string that the end of the text matches

    def push(self, text: str) -> str:
        """Add text and return what can be shown now."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        for place, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                self.matched = stop
                shown = self._held_back + text[: place + 1]
                self._held_back = ""
                return shown[: -len(stop)]
        joined = self._held_back + text
        first_held = len(joined) - max(self._progress)
        self._held_back = joined[first_held:]
        return joined[:first_held]

    def flush(self) -> str:
        """End the text and return what was held back, since it is not a stop string."""
        held, self._held_back = self._held_back, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Advance every automaton by one character; return the longest stop string that this completes."""
        found: str | None = None
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._progress[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._progress[index] = matched
            if matched == len(stop) and (found is None or matched > len(found)):
                found = stop
        return found


def _prefix_function(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders
