"""How long a request waits for its first token: the steps that lie before it, played through with what steps take now.

The same rules as the scheduler's, on counts alone: the oldest prompts are read first, as many tokens a step as the pace allows beside the
rows that decode, and who finds no place waits until a row ends. Steps that are alike are counted at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from app.hardware.tempo import Tempo
from app.measured import Snapshot
from app.turns import answer_seconds

_MAX_EVENTS = 60  # of which each is one step, or many alike: a longer queue goes on as it went so far


@dataclass(frozen=True, slots=True)
class Habits:
    """What is taken for granted of requests: tokens of a completion, and how many sequences may run."""

    completion_tokens: float
    max_running: int


class Line:
    """Rows that decode, prompts being read and those without a place, as they will stand some steps from now."""

    def __init__(self, tempo: Tempo, now: Snapshot, habits: Habits) -> None:
        self._tempo, self._habits = tempo, habits
        self._left = sorted(_expected(made, most, habits.completion_tokens) for made, most in now.rows)  # tokens, of each row
        self._context = now.context_tokens
        self._reading = [list(prompt) for prompt in now.prompts]  # tokens computed and to compute
        self._queue = list(now.queue)
        self._chunks: dict[tuple[int, int, int], int] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._left or self._reading or self._queue)

    @property
    def _to_compute(self) -> int:
        """Tokens of prompts that have not had their first token."""
        return sum(to_compute for _, to_compute in self._reading) + sum(self._queue)

    def join(self, prompts: Iterable[int]) -> None:
        self._queue.extend(prompts)

    def step(self) -> float:
        """One step, and the seconds that it takes."""
        return self._step(jump=False)

    def until_read(self) -> float:
        """Seconds until the last prompt in the line has its first token."""
        seconds, before = 0.0, self._to_compute
        for _ in range(_MAX_EVENTS):
            if not self._to_compute:
                return seconds
            seconds += self._step(jump=True)
        return seconds * before / max(before - self._to_compute, 1)

    def _step(self, jump: bool) -> float:
        while self._queue and len(self._left) + len(self._reading) < self._habits.max_running:
            self._reading.append([0, self._queue.pop(0)])
        rows = len(self._left)
        if not self._reading:
            return self._decode(ceil(self._left[0] / self._tempo.tokens_made) if jump and self._left else 1, 0, 0)
        computed, to_compute = self._reading[0]
        budget = self._chunk(rows, computed)
        if jump and to_compute > budget:
            steps = min(to_compute // budget, *self._left[:1]) if rows else to_compute // budget
            self._reading[0] = [computed + steps * budget, to_compute - steps * budget]
            seconds = self._decode(steps, budget, computed + steps * budget // 2)
            self._let_in([prompt for prompt in self._reading if prompt[1] == 0])
            return seconds
        tokens = self._read(budget)
        seconds = self._decode(1, tokens, computed)
        self._let_in([prompt for prompt in self._reading if prompt[1] == 0])
        return seconds

    def _chunk(self, rows: int, computed: int) -> int:
        """What the pace would allow; the depth of a prompt counts in coarse steps."""
        num_prompts = len(self._reading) + len(self._queue)
        key = rows, computed >> 8, num_prompts // max(rows, 1)
        if key not in self._chunks:
            room = max(self._tempo.max_tokens - rows, 1)
            self._chunks[key] = min(self._tempo.chunk(rows, self._context, computed, num_prompts), room)
        return self._chunks[key]

    def _read(self, budget: int) -> int:
        """The oldest prompts first; returns how many tokens there were to read."""
        left = budget
        for prompt in self._reading:
            tokens = min(prompt[1], left)
            prompt[0], prompt[1] = prompt[0] + tokens, prompt[1] - tokens
            left -= tokens
        return budget - left

    def _decode(self, steps: int, tokens: int, computed: int) -> float:
        """So many steps alike: every row goes on by a token in each, or by what guessing makes of it; who has ended leaves."""
        rows = len(self._left)
        computed_rows = rows if tokens else round(rows * (1 + self._tempo.guesses))
        made = steps if tokens else max(1, round(steps * self._tempo.tokens_made))
        seconds = steps * self._tempo.seconds(computed_rows, tokens, self._context + rows * steps // 2, computed)
        stay = [left - made for left in self._left if left > made]
        self._context = (self._context + rows * made) * len(stay) // rows if rows else 0
        self._left = stay
        return seconds

    def _let_in(self, read: list[list[int]]) -> None:
        """Prompts that are read become rows."""
        if read:
            self._reading = [prompt for prompt in self._reading if prompt[1] > 0]
            self._context += sum(computed for computed, _ in read)
            self._left = sorted([*self._left, *(max(1, round(self._habits.completion_tokens)) for _ in read)])


def _expected(made: int, most: int, completion_tokens: float) -> int:
    """Tokens that a row will still make: up to the usual length, and beyond that as many again, but never more than it may."""
    usual = completion_tokens - made if made < completion_tokens else completion_tokens
    return max(1, min(most, round(usual)))


def first_token_seconds(now: Snapshot, newcomers: list[tuple[float, int]], moment: float, habits: Habits) -> float | None:
    """What the last of `newcomers` waits from `moment` on, for a first token or its vectors; None where nobody knows what steps take.

    Newcomers are those that the snapshot does not know yet, as the moments of their sending and their tokens. The step under way began
    with the snapshot, or with the first of them where there was nothing to do, and takes in nobody.
    """
    if now.tempo is None:
        return None
    if now.tempo.steps.encode_points:
        return answer_seconds(now, newcomers, moment)
    line = Line(now.tempo, now, habits)
    began = now.stepped_at
    if line.is_idle:
        began, tokens = newcomers[0]
        line.join([tokens])
        newcomers = newcomers[1:]
        if not newcomers:
            return max(line.until_read() - (moment - began), 0.0)
    ends = max(began + line.step(), moment)  # one that is late may end any moment
    line.join(tokens for _, tokens in newcomers)
    return ends - moment + line.until_read()
