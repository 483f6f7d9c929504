"""How many tokens a draft model drafts: as many as pay off by measured acceptance and measured costs, else none.

All sequences that are drafted for get the same number, because the draft model computes them together. A sequence whose
draft tokens do not pay off pauses, as with n-gram lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.engine.scheduler.acceptance import MIN_SPEEDUP, SHARED_DECAY, AcceptanceRate, DecodeCostModel, DraftHistory
from app.engine.scheduler.batch import ScheduledSpan, Sequence


class DraftProposer(Protocol):
    """A draft model, without tensors."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Return True if the sequence can be drafted for; else do a part of what it lacks."""
        ...

    def propose(self, sequences: list[Sequence], num_tokens: int) -> Mapping[Sequence, tuple[int, ...]]:
        """Return `num_tokens` draft tokens for each sequence."""
        ...

    def step_seconds(self, num_sequences: int) -> float:
        """Return the seconds of one draft token for each of so many sequences; 0: not known."""
        ...

    def take_seconds(self) -> float:
        """Return the seconds spent since the last call."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a finished sequence."""
        ...


class ModelDrafting:
    """The policy of one draft model."""

    def __init__(self, model: DraftProposer, costs: DecodeCostModel, max_draft_tokens: int) -> None:
        self.model, self._costs, self._max_draft_tokens = model, costs, max_draft_tokens
        self._rate = AcceptanceRate(SHARED_DECAY)
        self._histories: dict[Sequence, DraftHistory] = {}

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft token is accepted, of all sequences together."""
        return self._rate.value()

    def drafts(
        self, spans: list[ScheduledSpan], all_spans: list[ScheduledSpan], left: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Return draft tokens for those of `spans` for which they pay off. At most `left` rows may be added."""
        ready: list[Sequence] = []
        for span in spans:
            history = self._histories.setdefault(span.sequence, DraftHistory())
            if history.pause > 0:
                history.pause -= 1
            elif self.model.is_ready(span.sequence):
                ready.append(span.sequence)
        if not ready or left < len(ready):
            return {}
        count = self._count(ready, all_spans, left)
        for sequence in ready:
            history = self._histories[sequence]
            history.is_probe = count == 0
            if count == 0:
                history.pause = history.next_pause
        return self.model.propose(ready, max(count, 1))

    def is_better(self, sequence: Sequence, acceptance: float, num_sequences: int, step_seconds: float) -> bool:
        """Return True if this draft model gains more per draft token than another method with this acceptance."""
        history, each = self._histories.get(sequence), self.model.step_seconds(1)
        if history is None or not each or history.pause > 0:
            return False
        return history.acceptance(self._rate) - num_sequences * each / step_seconds > acceptance

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record how many draft tokens were accepted."""
        self._histories[sequence].observe(drafted, accepted, self._rate)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._histories.pop(sequence, None)
        self.model.forget(sequence)

    def _count(self, ready: list[Sequence], spans: list[ScheduledSpan], left: int) -> int:
        """Return the number of draft tokens for each ready sequence that makes the most tokens per second."""
        rows, context = len(spans), sum(span.end for span in spans)
        alone, each = self._costs.decode(rows, context), self.model.step_seconds(len(ready))
        if not each:
            return 0
        rates = [self._histories[one].acceptance(self._rate) for one in ready]
        room = min(sequence.max_length - len(sequence.token_ids) - 1 for sequence in ready)
        best, taken, tokens = MIN_SPEEDUP * rows / alone, 0, float(rows)
        for count in range(1, min(self._max_draft_tokens, room, left // len(ready)) + 1):
            tokens += sum(rate**count for rate in rates)
            verified = max(alone, self._costs.decode(rows + count * len(ready), context))
            if tokens / (verified + count * each) > best:
                best, taken = tokens / (verified + count * each), count
        return taken
