"""Decides how many tokens of each sequence are worth guessing in a step: as many as make the most tokens a second by what is known.

Known are how often guesses were right (of this sequence, and of all before it) and what a step of more rows costs. Where guessing does not
pay it stops, and tries a single guess again after a pause that doubles each time: to be wrong costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from app.engine.batch import Span
from app.engine.drafts import Drafter
from app.engine.sequence import Sequence
from app.measured import StepStats

MOST_ROWS = 64  # of a step with guesses: beyond it products are bound by arithmetic, and steps of so many sizes are recorded
MOST_GUESSES = 7  # of a sequence in a step
WORTH = 1.03  # times the tokens a second without any guess: what is gained must pay for the guessing too
FIRST_PAUSE, LONGEST_PAUSE = 4, 32  # steps
_MEMORY = 0.9  # of what was seen before, at each new observation: the last ten count
_SHARED_MEMORY = 0.99
_TRUST = 2.0  # how many observations all sequences together count for in a sequence's own estimate


class Costs(Protocol):
    """What a step that decodes takes, in any unit; hears of every step."""

    def decode(self, rows: int, context_tokens: int = 0) -> float: ...
    def observe(self, step: StepStats) -> None: ...


@dataclass(slots=True)
class Rate:
    """How likely one more guess is right, given that those before it are. Begins with one right and one wrong."""

    memory: float
    right: float = 1.0
    wrong: float = 1.0

    def observe(self, guessed: int, right: int) -> None:
        """Guesses after the first wrong one say nothing."""
        self.right = self.right * self.memory + right
        self.wrong = self.wrong * self.memory + (right < guessed)

    def value(self, prior: float = 0.5, trust: float = 0.0) -> float:
        return (self.right + trust * prior) / (self.right + self.wrong + trust)


@dataclass(slots=True)
class Guesses:
    """What is known of one sequence's guesses. While `pause` lasts it is not even asked for any."""

    drafter: Drafter
    rate: Rate = field(default_factory=lambda: Rate(_MEMORY, 0.0, 0.0))
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    has_paused: bool = False
    is_trial: bool = False  # the one guess under way is only to see


Room = Callable[[Sequence, int], bool]  # whether a sequence's slot has room for so many guesses now
Idea = tuple[Span, tuple[int, ...]]  # a sequence that decodes, and what may follow


class Speculation:
    """Belongs to one engine. `drafter` makes each sequence's own; `most` bounds a sequence's guesses in a step."""

    def __init__(self, drafter: Callable[[Sequence], Drafter], costs: Costs, most: int = MOST_GUESSES) -> None:
        self._drafter, self._costs, self._most = drafter, costs, most
        self._rate = Rate(_SHARED_MEMORY)
        self._known: dict[Sequence, Guesses] = {}

    def with_drafter(self, drafter: Callable[[Sequence], Drafter]) -> Speculation:
        """Another that knows the same costs, and has guessed nothing yet."""
        return Speculation(drafter, self._costs, self._most)

    def guess(self, spans: list[Span], most_rows: int, room: Room) -> list[Span]:
        """The same decodes, with guesses behind those where they pay and find room; a step has at most `most_rows` rows."""
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
        """So many of a step's guesses were right."""
        guesses = self._known[sequence]
        guesses.rate.observe(guessed, right)
        self._rate.observe(guessed, right)
        if right:
            guesses.next_pause = FIRST_PAUSE
        elif guesses.is_trial:
            guesses.next_pause = min(2 * guesses.next_pause, LONGEST_PAUSE)

    def observe(self, step: StepStats) -> None:
        """What a step took, with guesses or without."""
        self._costs.observe(step)

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._known.pop(sequence, None)

    def _seconds(self, spans: list[Span]) -> Callable[[int], float]:
        """Of the step, by how many guesses it carries. Never less than without any, whatever was seen."""
        rows, context = len(spans), sum(span.end for span in spans)
        alone = self._costs.decode(rows, context)
        return lambda guesses: max(alone, self._costs.decode(rows + guesses, context))

    def _could_pay(self, spans: list[Span], left: int) -> bool:
        """Whether guesses would, were all of them right: nobody is asked for any where rows cost too much. Products take rows by tiles."""
        rows, seconds = len(spans), self._seconds(spans)
        return any(rows + more > WORTH * rows * seconds(more) / seconds(0) for more in (1, 2, 4, 8) if more <= left)

    def _ideas(self, spans: list[Span]) -> list[Idea]:
        """Penalties count what was said before, so rows of one sequence cannot be picked side by side; beams fork at every token."""
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
        """How many of each idea's tokens to guess: the likeliest guesses first, as far as tokens a second grow."""
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
    """Where no guess pays: none and a pause, and after the pause a single one, where a right one could pay."""
    guesses.is_trial = number == 0 and guesses.has_paused and may_try
    guesses.has_paused = number == 0 and not guesses.is_trial
    if guesses.has_paused:
        guesses.pause = guesses.next_pause
    return max(number, int(guesses.is_trial))
