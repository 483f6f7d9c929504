"""Incremental detokenization.

The text never has incomplete characters or anything past a stop string, and the whole text is never decoded again.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.text.stops import StopStrings
from app.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # a decoder writes it for bytes that are not a character, or not yet
_KEPT = (
    8,
    7,
    6,
    5,
)  # tokens to keep; at least 5: an incomplete character has at most 3 tokens, which must not be the window's first
_WIDE = 12  # tokens in the window at which it is narrowed
_HOPELESS = 24  # tokens in the window at which bytes that never became a character are shown as U+FFFD
_MAX_UNFINISHED = 3  # bytes: at most three of a UTF-8 character's four can be pending


class IncrementalText:
    """The text of a growing list of tokens, cut at the first stop string.

    The joined results of `push` and `flush` equal decoding all tokens at once. Each push decodes a window of the
    last tokens, so a token costs the same at any length. `context` are the tokens before the first one: the end of
    the prompt in a completion, so that a sentencepiece decoder keeps the space before the first word; empty in a
    chat, where the answer starts a text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._window = self._visible_end(context)
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
        certain = len(text.rstrip(_UNFINISHED))
        if certain < len(text) and len(self._window) >= _HOPELESS:
            certain = max(certain, len(text) - _MAX_UNFINISHED)
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) >= (_WIDE if certain == len(text) else _HOPELESS):
            self._narrow(text)
        return self._stops.push(piece)

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
        last_resort = _KEPT[:1] if len(self._window) >= _HOPELESS else ()
        for place, count in enumerate((*_KEPT, *last_resort)):
            tail = self._tokenizer.decode(self._window[-count:])
            if place >= len(_KEPT) or (len(tail) > waiting and text.endswith(tail)):
                self._window = self._window[-count:]
                self._shown = max(len(tail) - waiting, 0)
                return

    def _context_length(self) -> int:
        """Return the number of complete characters in the context.

        The context may end within a character that the next tokens complete.
        """
        text = self._decoded()
        meant = b"".join(map(self._tokenizer.token_bytes, self._window)).endswith(_UNFINISHED.encode())
        return len(text) if meant else len(text.rstrip(_UNFINISHED))

    def _visible_end(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens of a context that have text, starting at a character boundary if one is found."""
        visible: list[int] = []
        for token_id in reversed(context):
            if len(visible) == _KEPT[0]:
                break
            if self._tokenizer.has_text(token_id):
                visible.insert(0, token_id)
        ends = (visible[-count:] for count in _KEPT)
        return next((end for end in ends if _UNFINISHED not in self._tokenizer.decode(end)), visible)
