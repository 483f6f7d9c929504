"""How often draft tokens are accepted, and when they pay off: the rules that all methods of drafting share."""

from __future__ import annotations

from dataclasses import dataclass
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
