"""Search of a JSON body, while it arrives, for a prompt that is certainly too long: it is then neither kept nor parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from app.text.bounds import LeastTokens

# Names, marks and values that the scanner reads, in 1 µs each. It then ends: a body of many values is counted instead.
_SCANNED_MARKS = 4_096
_SCANNED_DEPTH = 8
_MARK = re.compile(rb'[{}\[\]:,"]')
# Whole characters of a string, each byte or an escape.
_CHARACTERS = re.compile(rb'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
_CLOSING = {ord("}"): "{", ord("]"): "["}
_MESSAGE_PATHS = ("messages[]", "input[]")
_ROLE_PATHS = frozenset(f"{path}.role" for path in _MESSAGE_PATHS)


class PromptScanner:
    """Search of a JSON body, while it arrives, for a prompt that certainly has more tokens than `limit`.

    It reads no further than its bounds on marks and depth. A message's text counts only if the message says before it
    that it is the user's: a chat template may leave out parts of others. `paths` say where prompts are, such as
    `prompt` or `messages[].content`.
    """

    def __init__(self, paths: Collection[str], new_count: Callable[[], LeastTokens], limit: int) -> None:
        self._paths, self._new_count, self._limit = paths, new_count, limit
        self._position, self._num_marks = 0, 0
        self._frames: list[tuple[str, str | None]] = []  # "{" with the name of the present value, or "["
        self._path = ""  # of the frames, such as `messages[].content`
        self._string_start: int | None = None
        self._count: LeastTokens | None = None
        self._is_users = False

    def feed(self, body: bytearray) -> int | None:
        """Read what has arrived since the last call. `body` has everything from the beginning.

        Return the least number of tokens of a prompt, if that is more than the limit.
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
            self._find_path()
        elif mark in _CLOSING and self._frames and self._frames[-1][0] == _CLOSING[mark]:
            self._frames.pop()
            self._find_path()
        elif character == "," and self._frames:
            if self._frames[-1][0] == "{":
                self._frames[-1] = ("{", None)
                self._find_path()
        elif character != ":":
            self._num_marks = _SCANNED_MARKS

    def _find_path(self) -> None:
        self._path = "".join("[]" if kind == "[" else f".{name}" for kind, name in self._frames)[1:]

    def _start_string(self) -> None:
        self._string_start = self._position
        is_name = bool(self._frames) and self._frames[-1] == ("{", None)
        if not is_name and self._path in self._paths and (not self._path.startswith(_MESSAGE_PATHS) or self._is_users):
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
            self._find_path()
        elif self._path in _ROLE_PATHS:
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
