"""How often draft tokens are accepted, and when they pay off: the rules that all methods of drafting share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MIN_SPEEDUP = (
    1.03  # required gain in tokens per second over no draft tokens; the gain must cover the cost of drafting too
)
MIN_PAUSE_STEPS, MAX_PAUSE_STEPS = 4, 32  # steps
DECAY = 0.9  # decay of earlier observations at each new one: about the last ten count
SHARED_DECAY = 0.99
PRIOR_WEIGHT = 2.0  # number of observations that the rate of all sequences counts for in a sequence's estimate


class DecodeCostModel(Protocol):
    """The cost of decode steps, in any unit."""

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the cost of a decode step with this many rows and this total context."""
        ...


@dataclass(slots=True)
class AcceptanceRate:
    """Decaying estimate of the probability that a draft token is accepted, given that those before it were.

    It begins with one accepted and one rejected token.
    """

    decay: float
    accepted: float = 1.0
    rejected: float = 1.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Record a result. Draft tokens after the first rejected one carry no information."""
        self.accepted = self.accepted * self.decay + accepted
        self.rejected = self.rejected * self.decay + (accepted < drafted)

    def value(self, prior: float = 0.5, prior_weight: float = 0.0) -> float:
        """Return the estimate, combined with a prior that counts as `prior_weight` observations."""
        return (self.accepted + prior_weight * prior) / (self.accepted + self.rejected + prior_weight)


@dataclass(slots=True)
class DraftHistory:
    """What became of one sequence's draft tokens. While `pause` is positive, none are requested.

    `is_probe`: the present draft is a single trial token.
    """

    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(DECAY, 0.0, 0.0))
    pause: int = 0
    next_pause: int = MIN_PAUSE_STEPS
    is_probe: bool = False

    def acceptance(self, shared: AcceptanceRate) -> float:
        """Return the probability that a draft token is accepted, with the rate of all sequences as the prior."""
        return self.rate.value(shared.value(), PRIOR_WEIGHT)

    def observe(self, drafted: int, accepted: int, shared: AcceptanceRate) -> None:
        """Record a result, also in the rate of all sequences. A trial token that is rejected doubles the next pause."""
        self.rate.observe(drafted, accepted)
        shared.observe(drafted, accepted)
        if accepted:
            self.next_pause = MIN_PAUSE_STEPS
        elif self.is_probe:
            self.next_pause = min(2 * self.next_pause, MAX_PAUSE_STEPS)
