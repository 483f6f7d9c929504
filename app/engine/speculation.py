"""Speculative decoding: choose the number of draft tokens of each sequence that maximizes tokens per second.

The choice uses the acceptance rate of earlier draft tokens, of this sequence and of all sequences, and the cost of
a step by number of rows. If draft tokens do not pay off, drafting pauses. After the pause it tries a single draft
token; the pause doubles after each failure, so a wrong choice costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from app.engine.batch import Span
from app.engine.drafts import Drafter
from app.engine.sequence import Sequence
from app.measured import StepStats

# maximum rows of a step with draft tokens; larger products are compute-bound, and each step size is recorded
MOST_ROWS = 64
MOST_GUESSES = 7  # per sequence and step
WORTH = 1.03  # required gain in tokens per second over no draft tokens; the gain must cover the cost of drafting too
FIRST_PAUSE, LONGEST_PAUSE = 4, 32  # steps
_MEMORY = 0.9  # decay of earlier observations at each new one: about the last ten count
_SHARED_MEMORY = 0.99
_TRUST = 2.0  # number of observations that the rate of all sequences counts for in a sequence's estimate


class Costs(Protocol):
    """The cost of decode steps, in any unit. It observes every step."""

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the cost of a decode step with this many rows and this total context."""
        ...

    def observe(self, step: StepStats) -> None:
        """Record a step."""
        ...


@dataclass(slots=True)
class Rate:
    """Decaying estimate of the probability that a draft token is accepted, given that those before it were.

    It begins with one accepted and one rejected token.
    """

    memory: float
    right: float = 1.0
    wrong: float = 1.0

    def observe(self, guessed: int, right: int) -> None:
        """Record a result. Draft tokens after the first rejected one carry no information."""
        self.right = self.right * self.memory + right
        self.wrong = self.wrong * self.memory + (right < guessed)

    def value(self, prior: float = 0.5, trust: float = 0.0) -> float:
        """Return the estimate, combined with a prior that counts as `prior_weight` observations."""
        return (self.right + trust * prior) / (self.right + self.wrong + trust)


@dataclass(slots=True)
class Guesses:
    """Drafting state of one sequence. While `pause` is positive, no draft tokens are requested."""

    drafter: Drafter
    rate: Rate = field(default_factory=lambda: Rate(_MEMORY, 0.0, 0.0))
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    has_paused: bool = False
    is_trial: bool = False  # the current draft is a single trial token


# reserves capacity for draft tokens in a sequence's slot; returns False if there is none
Room = Callable[[Sequence, int], bool]
Idea = tuple[Span, tuple[int, ...]]  # a decoding span and its proposed draft tokens


class Speculation:
    """The speculative decoding policy of one engine.

    `drafter` creates the drafter of each sequence. `max_draft_tokens` is the maximum number of draft tokens per
    sequence and step.
    """

    def __init__(self, drafter: Callable[[Sequence], Drafter], costs: Costs, most: int = MOST_GUESSES) -> None:
        self._drafter, self._costs, self._most = drafter, costs, most
        self._rate = Rate(_SHARED_MEMORY)
        self._known: dict[Sequence, Guesses] = {}

    def with_drafter(self, drafter: Callable[[Sequence], Drafter]) -> Speculation:
        """Return another policy with the same cost model and no acceptance history."""
        return Speculation(drafter, self._costs, self._most)

    def guess(self, spans: list[Span], most_rows: int, room: Room) -> list[Span]:
        """Return the same decodes, with draft tokens added where they pay off and `reserve` finds capacity.

        A step has at most `max_rows` rows.
        """
        left = min(most_rows, MOST_ROWS) - len(spans)
        ideas = self._ideas(spans) if self._could_pay(spans, left) else []
        if not ideas:
            return spans
        drafts: dict[Sequence, tuple[int, ...]] = {}
        for (span, ids), number in zip(ideas, self._numbers(spans, ideas, left), strict=True):
            if number and room(span.sequence, number):
                drafts[span.sequence] = ids[:number]
        return [span.with_drafts(drafts.get(span.sequence, ())) for span in spans] if drafts else spans

    def learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        """Record how many of a sequence's draft tokens were accepted in a step."""
        guesses = self._known[sequence]
        guesses.rate.observe(guessed, right)
        self._rate.observe(guessed, right)
        if right:
            guesses.next_pause = FIRST_PAUSE
        elif guesses.is_trial:
            guesses.next_pause = min(2 * guesses.next_pause, LONGEST_PAUSE)

    def observe(self, step: StepStats) -> None:
        """Record the time of a step, with or without draft tokens."""
        self._costs.observe(step)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._known.pop(sequence, None)

    def _seconds(self, spans: list[Span]) -> Callable[[int], float]:
        """Return the cost of the step as a function of the number of draft tokens.

        It is never less than the cost without any.
        """
        rows, context = len(spans), sum(span.end for span in spans)
        alone = self._costs.decode(rows, context)
        return lambda guesses: max(alone, self._costs.decode(rows + guesses, context))

    def _could_pay(self, spans: list[Span], left: int) -> bool:
        """Return True if draft tokens would pay off if all of them were accepted.

        If they would not, no drafter is called. Several counts are tried, because matrix products process rows in
        tiles.
        """
        rows, seconds = len(spans), self._seconds(spans)
        return any(rows + more > WORTH * rows * seconds(more) / seconds(0) for more in (1, 2, 4, 8) if more <= left)

    def _ideas(self, spans: list[Span]) -> list[Idea]:
        """Return the proposed draft tokens of the sequences that can have them.

        Sequences with penalties are left out: penalties count earlier tokens, so rows of one sequence cannot be
        sampled in parallel. Beams are left out because they fork at every token.
        """
        found: list[Idea] = []
        for span in spans:
            sequence = span.sequence
            if sequence.is_beam or sequence.params.has_penalties:
                continue
            guesses = self._known.get(sequence)
            if guesses is None:
                guesses = self._known[sequence] = Guesses(self._drafter(sequence))
            if guesses.pause > 0:
                guesses.pause -= 1
                continue
            most = min(self._most, sequence.limit - len(sequence.token_ids) - 1)
            ids = guesses.drafter.propose(sequence.token_ids, most) if most > 0 else ()
            if ids:
                found.append((span, ids))
        return found

    def _numbers(self, spans: list[Span], ideas: list[Idea], left: int) -> list[int]:
        """Return the number of draft tokens to use from each proposal.

        The most likely tokens are taken first, as long as tokens per second grow.
        """
        known = [self._known[span.sequence] for span, _ in ideas]
        chances = [
            (self._chance(guesses) ** place, index)
            for index, (guesses, (_, ids)) in enumerate(zip(known, ideas, strict=True))
            for place in range(1, len(ids) + 1)
        ]
        chances.sort(reverse=True)
        rows, seconds = len(spans), self._seconds(spans)
        tokens, worth = float(rows), WORTH * rows / seconds(0)
        best, taken = worth, 0
        for count, (chance, _) in enumerate(chances[:left], 1):
            tokens += chance
            if tokens / seconds(count) > best:
                best, taken = tokens / seconds(count), count
        numbers = [0] * len(ideas)
        for _, index in chances[:taken]:
            numbers[index] += 1
        may_try = taken < left and (rows + 1) / seconds(1) > worth
        return [_or_trial(number, guesses, may_try) for number, guesses in zip(numbers, known, strict=True)]

    def _chance(self, guesses: Guesses) -> float:
        return guesses.rate.value(self._rate.value(), _TRUST)


def _or_trial(number: int, guesses: Guesses, may_try: bool) -> int:
    """Return the number of draft tokens after applying the pause rule.

    If none pays off, the sequence pauses. After the pause it gets a single trial token, if that would pay off when
    accepted.
    """
    guesses.is_trial = number == 0 and guesses.has_paused and may_try
    guesses.has_paused = number == 0 and not guesses.is_trial
    if guesses.has_paused:
        guesses.pause = guesses.next_pause
    return max(number, int(guesses.is_trial))
