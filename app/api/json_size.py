"""Size of a JSON body, known before it is parsed: the number of its values, and prompts that are certainly too long.

A parser holds the interpreter until it has built every object: 14 s for a body of 16 MiB with four million lists. So
the values of a large body are counted first, in steps of some microseconds between which other threads run, and a body
with too many is refused before an object exists.

A prompt is weighed while the body arrives (`PromptScanner`), so that one that is far too long is neither kept nor parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from app.errors import InvalidRequest
from app.text.bounds import LeastTokens

# Bodies up to this size are parsed on the event loop: in 0.2 ms, in 5 ms with as many values as fit.
LOOP_BYTES = 16 * 1024
# Values separated by commas: as many token ids as the longest contexts have, or 6 images of 3 × 224 × 224. Each takes 54 ns.
MAX_VALUES = 2**20
# Strings (also names of fields), lists and objects: 4,096 messages of a role and a text are 20,480. They take 170 ns each.
MAX_STRINGS_AND_LISTS = 65_536
_STEP_BYTES = 64 * 1024
# The rest of a string; possessive, so that nothing is remembered for another try.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


def check_num_values(body: bytes) -> None:
    """Count the values of a JSON text, valid or not.

    Raises:
        InvalidRequest: There are more than this server parses.
    """
    position, num_values, num_objects = 0, 0, 0
    while position < len(body):
        end = min(position + _STEP_BYTES, len(body))
        quote = body.find(b'"', position, end)
        stop = end if quote < 0 else quote
        num_values += body.count(b",", position, stop)
        num_objects += body.count(b"[", position, stop) + body.count(b"{", position, stop) + (quote >= 0)
        if num_values > MAX_VALUES or num_objects > MAX_STRINGS_AND_LISTS:
            raise InvalidRequest(
                f"The body has too many values: this server parses at most {MAX_VALUES} in one body, and "
                f"{MAX_STRINGS_AND_LISTS} strings, lists and objects. Send tensors as binary data, or several requests."
            )
        position = stop if quote < 0 else _end_of_string(body, quote + 1)


def _end_of_string(body: bytes, position: int) -> int:
    """Return the position after the string's closing quote, or the body's length if there is none."""
    while position < len(body):
        found = _STRING.match(body, position, position + _STEP_BYTES)
        assert found is not None, "the pattern matches the empty text"
        position = found.end()
        if body[position : position + 1] == b'"':
            return position + 1
        if body[position : position + 1] == b"\\":  # the window or the body ends within an escape
            position += 2
    return len(body)


# Bodies up to this size are not scanned while they arrive.
SCAN_BYTES = 64 * 1024
# Names, marks and values that the scanner reads, in 1 µs each. It then ends: a body of many values is counted instead.
_SCANNED_MARKS = 4_096
_SCANNED_DEPTH = 8
_MARK = re.compile(rb'[{}\[\]:,"]')
# Whole characters of a string, each byte or an escape.
_CHARACTERS = re.compile(rb'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
_CLOSING = {ord("}"): "{", ord("]"): "["}
_MESSAGE_PATHS = ("messages[]", "input[]")


class PromptScanner:
    """Search of a JSON body, while it arrives, for a prompt that certainly has more tokens than `limit`.

    It reads no further than its bounds on marks and depth, and finds nothing then. A message's text counts only if the
    message says before it that it is the user's: a chat template may leave out parts of others.

    Args:
        paths: Where prompts are, such as `prompt` or `messages[].content`.
        new_count: Return a new count of tokens.
        limit: Number of tokens that a prompt may have.
    """

    def __init__(self, paths: Collection[str], new_count: Callable[[], LeastTokens], limit: int) -> None:
        self._paths, self._new_count, self._limit = paths, new_count, limit
        self._position, self._num_marks = 0, 0
        self._frames: list[tuple[str, str | None]] = []  # "{" with the name of the present value, or "["
        self._string_start: int | None = None
        self._count: LeastTokens | None = None
        self._is_users = False

    def feed(self, body: bytearray) -> int | None:
        """Read what has arrived since the last call. `body` has everything from the beginning.

        Returns:
            The number of tokens that a prompt has at least, if that is more than the limit.
        """
        while self._position < len(body) and self._num_marks < _SCANNED_MARKS:
            if self._string_start is None:
                found = _MARK.search(body, self._position)
                self._position = len(body) if found is None else found.end()
                if found is not None:
                    self._num_marks += 1
                    self._take(found[0][0])
                continue
            is_whole = self._read_string(body)
            if self._count is not None and self._count.exceeds(self._limit):
                return self._count.tokens
            if not is_whole:
                break
            self._end_string(body)
        return None

    def _take(self, mark: int) -> None:
        """Follow a mark outside of strings. Whatever is no JSON ends the search."""
        character = chr(mark)
        if character == '"':
            self._start_string()
        elif character in "{[" and len(self._frames) < _SCANNED_DEPTH:
            if character == "{" and self._path in _MESSAGE_PATHS:
                self._is_users = False
            self._frames.append((character, None))
        elif mark in _CLOSING and self._frames and self._frames[-1][0] == _CLOSING[mark]:
            self._frames.pop()
        elif character == "," and self._frames:
            self._frames[-1] = (self._frames[-1][0], None)
        elif character != ":":
            self._num_marks = _SCANNED_MARKS

    @property
    def _path(self) -> str:
        """Path of the present value."""
        return "".join("[]" if kind == "[" else f".{name}" for kind, name in self._frames)[1:]

    def _start_string(self) -> None:
        self._string_start = self._position
        is_name = bool(self._frames) and self._frames[-1] == ("{", None)
        path = self._path
        if not is_name and path in self._paths and (not path.startswith(_MESSAGE_PATHS) or self._is_users):
            self._count = self._new_count()

    def _read_string(self, body: bytearray) -> bool:
        """Read on in a string; return True if its end has arrived."""
        found = _CHARACTERS.match(body, self._position)
        assert found is not None, "the pattern matches the empty text"
        if self._count is not None:
            self._count.add(_unescaped(found[0]))
        self._position = found.end()
        return body[self._position : self._position + 1] == b'"'

    def _end_string(self, body: bytearray) -> None:
        assert self._string_start is not None, "a string has begun"
        start, self._string_start, self._count = self._string_start, None, None
        kind, name = self._frames[-1] if self._frames else ("", "")
        if kind == "{" and name is None:
            self._frames[-1] = (kind, body[start : self._position].decode(errors="replace"))
        elif self._path in [f"{path}.role" for path in _MESSAGE_PATHS]:
            self._is_users = body[start : self._position] == b"user"
        self._position += 1


def _unescaped(part: bytes) -> bytes:
    """Return the text of a part of a string; empty if an escape in it is wrong."""
    if b"\\" not in part:
        return part
    try:
        text: str = json.loads(f'"{part.decode(errors="ignore")}"', strict=False)
    except ValueError:
        return b""
    return text.encode(errors="surrogatepass")
