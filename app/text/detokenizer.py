"""Incremental detokenization: the text of a growing list of tokens, up to a stop string.

The text never has incomplete characters or anything past a stop string, and the whole text is never decoded again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from app.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are not a character, or not yet

# Tokens to keep; at least 5: an incomplete character has at most 3 tokens, which must not be the window's first.
_NARROWED_TOKENS = (8, 7, 6, 5)
_WIDE_TOKENS = 12  # tokens in the window at which it is narrowed
_MAX_WINDOW_TOKENS = 24  # tokens in the window at which bytes that never became a character are shown as U+FFFD
_MAX_WHOLE_TOKENS = 128  # tokens in a window all of whose text was returned: it is decoded only to be narrowed
_MAX_PENDING_BYTES = 3  # bytes: at most three of a UTF-8 character's four can be pending


class IncrementalDetokenizer:
    """The text of a growing list of tokens, cut at the first stop string.

    The joined results of `push` and `flush` equal decoding all tokens at once. Each push decodes a window of the last
    tokens, so a token costs the same at any length. `context` are the tokens before the first one: the end of the
    prompt in a completion, so that a sentencepiece decoder keeps the space before the first word; empty in a chat,
    where the answer starts a text. `literals` are the special tokens that are part of the text, by id. A stop string
    that the first `min_tokens` tokens complete does not end the text, as in vLLM. Stop strings may contain special
    tokens, which are not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        context: Sequence[int] = (),
        literals: Mapping[int, str] = MappingProxyType({}),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._literals = literals
        hidden = (
            [name for token_id, name in tokenizer.special_tokens.items() if token_id not in literals] if stops else []
        )
        self._stops, self._has_stops = StopStrings(stops, include_stop, hidden), bool(stops)
        self._early_tokens = min_tokens
        self._window = self._context_window(context) if context else []
        # Characters of the window's text that were already returned.
        self._shown = self._context_length() if self._window else 0
        self._is_whole = False  # True if that is all of the window's text, which has a token at least

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; often empty."""
        is_early = self._early_tokens > 0
        self._early_tokens -= 1
        piece = self._tokenizer.piece(token_id) if self._is_whole else None
        if piece is not None:
            window = self._window
            window.append(token_id)
            self._shown += len(piece)
            if len(window) >= _MAX_WHOLE_TOKENS:
                self._narrow_whole()
            return self._stops.push(piece, is_early=is_early) if self._has_stops else piece
        if not self._tokenizer.has_text(token_id):
            literal = self._literals.get(token_id)
            name = self._tokenizer.token_text(token_id) if literal is None else literal
            return self._stops.push(name, is_hidden=literal is None, is_early=is_early)
        self._window.append(token_id)
        text = self._decoded()
        certain = len(text.rstrip(_REPLACEMENT))
        if certain < len(text) and len(self._window) >= _MAX_WINDOW_TOKENS:
            certain = max(certain, len(text) - _MAX_PENDING_BYTES)
        new_text = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        self._is_whole = certain == len(text)
        if len(self._window) >= (_WIDE_TOKENS if certain == len(text) else _MAX_WINDOW_TOKENS):
            self._narrow(text)
        return self._stops.push(new_text, is_early=is_early)

    def flush(self) -> str:
        """End the tokens and return the text that was held back, with incomplete characters as U+FFFD."""
        rest = "" if self._is_whole else self._decoded()[self._shown :]
        self._shown += len(rest)
        shown = self._stops.push(rest, is_early=self._early_tokens >= 0)
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

    def _narrow_whole(self) -> None:
        """Drop the window's first tokens, all of whose text was returned."""
        last = self._window[-_NARROWED_TOKENS[0] :]
        if None in map(self._tokenizer.piece, last):
            self._narrow(self._decoded())
        else:  # the rest has the same text, except for the first token's if the decoder changes it
            self._window, self._shown = last, len(self._tokenizer.decode(last))

    def _context_length(self) -> int:
        """Count the complete characters of the context, which may end within one that the next tokens complete."""
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

    If two stop strings end at the same character, the longer one counts. Each stop string is matched with the
    Knuth-Morris-Pratt automaton, so a character costs one step per stop string, however much text is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, hidden: Collection[str] = ()) -> None:
        """Set the stop strings. Only those that contain one of `hidden`, texts of special tokens, see them."""
        self.matched: str | None = None
        self._include = include  # the text ends after the stop string, not before it
        # Not shown yet: the longest suffix of the text that is a prefix of a stop string. A mark is 1 if its character
        # belongs to a special token.
        self._held_back, self._marks = "", bytearray()
        self._stops = [(stop, _prefix_function(stop)) for stop in stops]
        self._sees_hidden = [any(name in stop for name in hidden) for stop in stops]
        self._progress = [0] * len(stops)  # characters of each stop string that the end of the text matches

    def push(self, text: str, is_hidden: bool = False, is_early: bool = False) -> str:
        """Add text and return what can be shown now.

        `is_hidden`: it is the text of a special token. `is_early`: a stop string that it completes does not count.
        """
        if self.matched is not None:
            return ""
        if is_hidden and not any(self._sees_hidden):
            return ""
        if not self._stops:
            return text
        for place, character in enumerate(text):
            found = self._advance(character, is_hidden)
            if found is not None and not is_early:
                self._hold(text[: place + 1], is_hidden)
                return self._end(found)
            if found is not None:
                self._forget_complete()
        self._hold(text, is_hidden)
        return self._shown(len(self._held_back) - max(map(self._length_held, self._progress, self._sees_hidden)))

    def flush(self) -> str:
        """End the text and return what was held back, since it is not a stop string."""
        return self._shown(len(self._held_back))

    def _hold(self, text: str, is_hidden: bool) -> None:
        self._held_back += text
        self._marks += bytes([is_hidden]) * len(text)

    def _shown(self, count: int) -> str:
        """Return the visible ones of the first characters that are held back, and forget them all."""
        text, marks = self._held_back[:count], self._marks[:count]
        self._held_back = self._held_back[count:]
        del self._marks[:count]
        if not any(marks):
            return text
        return "".join(character for character, mark in zip(text, marks, strict=True) if not mark)

    def _end(self, place: int) -> str:
        """End the text with a stop string and return the rest of what is shown."""
        self.matched = stop = self._stops[place][0]
        before = self._shown(len(self._held_back) - self._length_held(len(stop), self._sees_hidden[place]))
        self._held_back = ""
        self._marks.clear()
        return before + stop if self._include else before

    def _length_held(self, progress: int, sees_hidden: bool) -> int:
        """Return how many of the last characters hold the last `progress` ones that a stop string sees."""
        if sees_hidden or not any(self._marks):
            return progress
        length = 0
        while progress:
            length += 1
            progress -= not self._marks[-length]
        return length

    def _forget_complete(self) -> None:
        for index, (stop, borders) in enumerate(self._stops):
            if self._progress[index] == len(stop):
                self._progress[index] = borders[-1]

    def _advance(self, character: str, is_hidden: bool) -> int | None:
        """Advance the automata by one character; return the place of the longest stop string that this completes."""
        found: int | None = None
        for index, (stop, borders) in enumerate(self._stops):
            if is_hidden and not self._sees_hidden[index]:
                continue
            matched = self._progress[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._progress[index] = matched
            if matched == len(stop) and (found is None or matched > len(self._stops[found][0])):
                found = index
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
