"""Guesses at what a text says next, from what it said before: where its last tokens stood earlier, and what came then.

No second model. Whether a guess is worth a row of the step is `speculation.py`'s business, whether it was right the model's alone.
"""

from __future__ import annotations

from typing import Protocol

NGRAMS = (3, 2)  # tokens that must stand there again; the longest that does is followed
# Tokens whose n-grams are noted in a step: 0.3 ms. A long prompt is read from its end over many steps, so none of them waits for it.
READ_AT_ONCE = 512


class Drafter(Protocol):
    """Belongs to one sequence, whose tokens only ever grow."""

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """At most so many guesses of what follows `token_ids`, in order; none where there is no idea."""
        ...


class PromptLookup:
    """Notes where each n-gram of prompt and completion ended last: two entries a token, and nothing before the first question."""

    def __init__(self) -> None:
        # N-gram to where its latest occurrence ends; the last tokens themselves are not among them.
        self._ends: dict[tuple[int, ...], int] = {}
        self._first = self._last = 0  # occurrences that end in (first, last] are noted

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        self._read(token_ids)
        after = next((self._ends[gram] for size in NGRAMS if (gram := tuple(token_ids[-size:])) in self._ends), None)
        if after is None:
            return ()
        period = len(token_ids) - after  # where the earlier place runs into this one, the text is taken to repeat itself
        return tuple(token_ids[after + place % period] for place in range(most))

    def _read(self, token_ids: list[int]) -> None:
        """The newest first, then further back: what was said last counts for more."""
        newest = len(token_ids) - 1
        if self._last == 0:
            self._first = self._last = newest
        end = min(newest, self._last + READ_AT_ONCE)
        for at in range(self._last + 1, end + 1):
            for size in NGRAMS:
                if at >= size:
                    self._ends[tuple(token_ids[at - size : at])] = at
        begin = max(0, self._first - (READ_AT_ONCE - (end - self._last)))
        for at in range(self._first, begin, -1):
            for size in NGRAMS:
                if at >= size:
                    self._ends.setdefault(tuple(token_ids[at - size : at]), at)
        self._first, self._last = begin, end
