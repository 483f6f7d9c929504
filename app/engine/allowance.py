"""How many tokens a step may have where memory does not suffice for more: halved by a step that wanted too much, it grows back slowly."""

from __future__ import annotations

from app.engine.batch import Batch

# Of itself, at each step that was computed: twice as much after some 45 steps. What was too much once may fit later (a prompt that wanted
# much is over), and each try that fails costs a step; so it is tried again seldom enough to cost little.
_GROWTH = 64


class Allowance:
    """`tokens` of the next step, decodes and prompts together: prompts are cut first, since decodes are in a step before them."""

    def __init__(self, most: int) -> None:
        self.tokens = self._most = most

    def shrink(self, batch: Batch) -> bool:
        """This step wanted too much. False where no smaller one can be made of it: one token, or the beams of one search.

        Each True makes `tokens` smaller, so whoever tries until False comes to an end.
        """
        first = batch.spans[0].sequence
        beams_alone = first.is_beam and all(
            span.is_decode and span.sequence.request_id == first.request_id for span in batch.spans
        )
        if beams_alone or batch.num_tokens < 2 or self.tokens < 2:
            return False
        self.tokens = min(self.tokens, batch.num_tokens) // 2
        return True

    def grow(self) -> None:
        """A step was computed."""
        if self.tokens < self._most:
            self.tokens = min(self._most, self.tokens + max(1, self.tokens // _GROWTH))
