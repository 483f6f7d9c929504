"""Prediction of the time to first token: simulates the steps before it, with current step times.

The simulation follows the scheduler's rules on counts alone. The oldest prompts are read first, with as many
tokens per step as the prefill budget allows next to the decoding rows, and a request without a free place waits
until a row ends. Steps that are alike are counted at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from app.hardware.tempo import Tempo
from app.measured import Snapshot
from app.turns import answer_seconds

_MAX_EVENTS = 60  # simulated events, each one step or many equal steps; beyond them the result is extrapolated


@dataclass(frozen=True, slots=True)
class Habits:
    """Assumptions about requests: the tokens of a completion, and how many sequences may run."""

    completion_tokens: float
    max_running: int


class Line:
    """Simulated scheduler state: decoding rows, prompts in prefill and queued prompts."""

    def __init__(self, tempo: Tempo, now: Snapshot, habits: Habits) -> None:
        self._tempo, self._habits = tempo, habits
        self._left = sorted(
            _expected(made, most, habits.completion_tokens) for made, most in now.rows
        )  # tokens to generate, per row
        self._context = now.context_tokens
        self._reading = [list(prompt) for prompt in now.prompts]  # [tokens computed, tokens to compute]
        self._queue = list(now.queue)
        self._chunks: dict[tuple[int, int, int], int] = {}

    @property
    def is_idle(self) -> bool:
        """True when there are no rows and no prompts."""
        return not (self._left or self._reading or self._queue)

    @property
    def _to_compute(self) -> int:
        """Prompt tokens of all requests that have no first token yet."""
        return sum(to_compute for _, to_compute in self._reading) + sum(self._queue)

    def join(self, prompts: Iterable[int]) -> None:
        """Append prompts, given as token counts, to the queue."""
        self._queue.extend(prompts)

    def step(self) -> float:
        """Simulate one step and return its seconds."""
        return self._step(jump=False)

    def until_read(self) -> float:
        """Return the seconds until the last queued prompt has its first token."""
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
        """Return the prompt tokens that the prefill budget allows in a step.

        Results are cached by the prompt's depth in units of 256 tokens.
        """
        num_prompts = len(self._reading) + len(self._queue)
        key = rows, computed >> 8, num_prompts // max(rows, 1)
        if key not in self._chunks:
            room = max(self._tempo.max_tokens - rows, 1)
            self._chunks[key] = min(self._tempo.chunk(rows, self._context, computed, num_prompts), room)
        return self._chunks[key]

    def _read(self, budget: int) -> int:
        """Take tokens from the oldest prompts first; return how many tokens were available."""
        left = budget
        for prompt in self._reading:
            tokens = min(prompt[1], left)
            prompt[0], prompt[1] = prompt[0] + tokens, prompt[1] - tokens
            left -= tokens
        return budget - left

    def _decode(self, steps: int, tokens: int, computed: int) -> float:
        """Simulate `steps` equal steps and return their seconds.

        Each row advances by one token per step, or by `tokens_per_step` with speculation. Finished rows leave.
        """
        rows = len(self._left)
        computed_rows = rows if tokens else round(rows * (1 + self._tempo.guesses))
        made = steps if tokens else max(1, round(steps * self._tempo.tokens_made))
        seconds = steps * self._tempo.seconds(computed_rows, tokens, self._context + rows * steps // 2, computed)
        stay = [left - made for left in self._left if left > made]
        self._context = (self._context + rows * made) * len(stay) // rows if rows else 0
        self._left = stay
        return seconds

    def _let_in(self, read: list[list[int]]) -> None:
        """Turn prompts that are fully read into decoding rows."""
        if read:
            self._reading = [prompt for prompt in self._reading if prompt[1] > 0]
            self._context += sum(computed for computed, _ in read)
            self._left = sorted([*self._left, *(max(1, round(self._habits.completion_tokens)) for _ in read)])


def _expected(made: int, most: int, completion_tokens: float) -> int:
    """Return the tokens that a row is expected to generate from now on.

    This is the rest of the typical length, or a typical length more for a row beyond it, but never more than
    `most`.
    """
    usual = completion_tokens - made if made < completion_tokens else completion_tokens
    return max(1, min(most, round(usual)))


def first_token_seconds(now: Snapshot, newcomers: list[tuple[float, int]], moment: float, habits: Habits) -> float | None:
    """Return the seconds from `moment` until the last of `newcomers` has its first token, or its vectors.

    Returns None if step times are unknown. Newcomers are requests that the snapshot does not include yet, as
    (time sent, tokens). The current step began with the snapshot, or with the first newcomer if the worker was
    idle, and takes in no other request.
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
    ends = max(began + line.step(), moment)  # an overdue step may end at any moment
    line.join(tokens for _, tokens in newcomers)
    return ends - moment + line.until_read()
