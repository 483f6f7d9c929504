"""Draft tokens from n-gram lookup: find an earlier occurrence of the last tokens and propose what followed it.

No second model is needed. `Speculation` decides whether a draft token is worth a row of the step, and the model
verifies it.
"""

from __future__ import annotations

from typing import Protocol

NGRAMS = (3, 2)  # lengths of the n-grams to match; the longest match is used
# Number of tokens whose n-grams are indexed per step, which takes 0.3 ms. A long prompt is indexed from its end
# over many steps, so that no step waits for it.
READ_AT_ONCE = 512


class Drafter(Protocol):
    """Proposes draft tokens for one sequence. The tokens of the sequence only grow."""

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Return at most `max_tokens` draft tokens that may follow `token_ids`, in order.

        Empty if there are none.
        """
        ...


class PromptLookup:
    """Index of the last position of each n-gram in prompt and completion.

    It has two entries per token. Nothing is indexed before the first call of `propose`.
    """

    def __init__(self) -> None:
        # Maps an n-gram to the end of its latest occurrence. The n-grams at the end of the tokens are not
        # included.
        self._ends: dict[tuple[int, ...], int] = {}
        self._first = self._last = 0  # occurrences that end in (first, last] are indexed

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Return at most `max_tokens` tokens that followed the latest earlier occurrence of the last n-gram."""
        self._read(token_ids)
        after = next((self._ends[gram] for size in NGRAMS if (gram := tuple(token_ids[-size:])) in self._ends), None)
        if after is None:
            return ()
        period = len(token_ids) - after  # the draft repeats with this period once it reaches the end of the tokens
        return tuple(token_ids[after + place % period] for place in range(most))

    def _read(self, token_ids: list[int]) -> None:
        """Index the newest tokens first, then older ones: recent occurrences take precedence."""
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
