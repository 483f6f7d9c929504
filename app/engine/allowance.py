"""Token budget of a step. A step that runs out of device memory halves it, and it then grows back slowly."""

from __future__ import annotations

from app.engine.batch import Batch

# The budget grows by 1/64 at each step that was computed, so it doubles after about 45 steps. A size that failed
# once may fit later (for example once a prompt that needed much memory is done), but each failed try costs a step.
# Slow growth makes retries rare enough to be cheap.
_GROWTH = 64


class Allowance:
    """The number of tokens that the next step may compute, decodes and prefill together.

    `tokens` is the current budget. Decodes take their share first, so a smaller budget cuts prefill before
    decodes.
    """

    def __init__(self, most: int) -> None:
        self.tokens = self._most = most

    def shrink(self, batch: Batch) -> bool:
        """Halve the budget after this step ran out of memory.

        Returns False if no smaller step can be made of the batch: it has one token, or only the beams of one
        search. Each call that returns True makes `tokens` smaller, so a caller that retries until False
        terminates.
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
        """Grow the budget a little after a step that was computed."""
        if self.tokens < self._most:
            self.tokens = min(self._most, self.tokens + max(1, self.tokens // _GROWTH))
