"""Prediction of the time to first token, or until texts are encoded, from token counts and current step times.

For decoders, the steps before the first token are simulated with the scheduler's rules. The oldest prompts are read
first, with as many tokens per step as the prefill budget allows next to the decoding rows, and a request without a
free place waits until a row ends. Equal steps are counted at once.

For encoders, the steps are added up in the engine's order. A program's rows are served first come, first served. For
texts, half of each step belongs to the oldest request, and the rest to requests of the smallest size class, first
come, first served.
"""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from math import ceil

from app.engine.encoder.batching import size_class
from app.hardware.step_times import StepTimes
from app.metrics.stats import EngineSnapshot


def encode_wait_seconds(snapshot: EngineSnapshot, newcomers: Sequence[tuple[float, int]], now: float) -> float:
    """Return the seconds from `now` until all texts of the last of `newcomers` are encoded.

    Newcomers are requests that the snapshot does not include yet, as (time sent, tokens). The current step began
    with the snapshot, or with the first newcomer if the worker was idle, and takes in no other request.
    """
    assert snapshot.step_times is not None, "the caller checks that step times are known"
    step_started_at, queue = snapshot.stepped_at, [tokens for tokens in snapshot.queue if tokens > 0]
    if not queue:
        step_started_at, first = newcomers[0]
        queue, newcomers = [first], newcomers[1:]
        if not newcomers:
            return max(_seconds_until_done(snapshot.step_times, queue) - (now - step_started_at), 0.0)
    step_tokens = _simulate_step(queue, snapshot.step_times)
    step_ends_at = max(
        step_started_at + snapshot.step_times.encode(step_tokens), now
    )  # an overdue step may end at any moment
    queue += [tokens for _, tokens in newcomers]
    return step_ends_at - now + _seconds_until_done(snapshot.step_times, queue)


def _simulate_step(queue: list[int], step_times: StepTimes) -> int:
    """Take one step's tokens from the queue and return their number."""
    budget = step_times.max_tokens
    left = budget - _take_tokens(queue, 0, budget if step_times.oldest_first else budget // 2)
    for index in sorted(range(len(queue)), key=lambda index: _size_class(queue[index], step_times)):
        if not left:
            break
        left -= _take_tokens(queue, index, left)
    return budget - left


def _size_class(tokens: int, step_times: StepTimes) -> int:
    """Return the size class of a request. Smaller classes go first; within a class, first come, first served."""
    return 0 if step_times.oldest_first else size_class(tokens, step_times.max_tokens)


def _take_tokens(queue: list[int], index: int, budget: int) -> int:
    tokens = min(queue[index], budget)
    queue[index] -= tokens
    return tokens


def _seconds_until_done(step_times: StepTimes, queue: Sequence[int]) -> float:
    """Return the seconds until the last request of the queue has all its texts.

    Before it come the requests of no larger class (`own_class_tokens` counts their tokens and its own). Meanwhile the
    other half of each step goes to older requests of larger classes, as long as they have tokens left.
    """
    budget, total = step_times.max_tokens, sum(queue)
    last = _size_class(queue[-1], step_times)
    own_class_tokens = sum(tokens for tokens in queue if _size_class(tokens, step_times) <= last)
    before = own_class_tokens + min(own_class_tokens, total - own_class_tokens)
    full = (before - 1) // budget
    return full * step_times.encode(budget) + step_times.encode(min(budget, total - full * budget))


_MAX_EVENTS = 60  # simulated events, each one step or many equal steps; beyond them the result is extrapolated


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """Assumptions about requests: the tokens of a completion, and how many sequences may run."""

    completion_tokens: float
    max_running: int


class SchedulerSimulation:
    """Simulated scheduler state: decoding rows, prompts in prefill and queued prompts."""

    def __init__(self, step_times: StepTimes, snapshot: EngineSnapshot, typical: TypicalRequest) -> None:
        self._step_times, self._typical = step_times, typical
        self._remaining = sorted(
            _expected_remaining_tokens(made, most, typical.completion_tokens) for made, most in snapshot.rows
        )  # tokens to generate, per row
        self._context = snapshot.context_tokens
        self._prefilling = [list(prompt) for prompt in snapshot.prompts]  # [tokens computed, tokens to compute]
        self._queue = list(snapshot.queue)
        self._prefill_budgets: dict[tuple[int, int, int], int] = {}

    @property
    def is_idle(self) -> bool:
        """True when there are no rows and no prompts."""
        return not (self._remaining or self._prefilling or self._queue)

    @property
    def _uncomputed_tokens(self) -> int:
        """Prompt tokens of all requests that have no first token yet."""
        return sum(to_compute for _, to_compute in self._prefilling) + sum(self._queue)

    def join(self, prompts: Iterable[int]) -> None:
        """Append prompts, given as token counts, to the queue."""
        self._queue.extend(prompts)

    def step(self) -> float:
        """Simulate one step and return its seconds."""
        return self._step(jump=False)

    def seconds_until_prefilled(self) -> float:
        """Return the seconds until the last queued prompt has its first token."""
        seconds, before = 0.0, self._uncomputed_tokens
        for _ in range(_MAX_EVENTS):
            if not self._uncomputed_tokens:
                return seconds
            seconds += self._step(jump=True)
        return seconds * before / max(before - self._uncomputed_tokens, 1)

    def _step(self, jump: bool) -> float:
        while self._queue and len(self._remaining) + len(self._prefilling) < self._typical.max_running:
            self._prefilling.append([0, self._queue.pop(0)])
        rows = len(self._remaining)
        if not self._prefilling:
            return self._decode(
                ceil(self._remaining[0] / self._step_times.tokens_per_step) if jump and self._remaining else 1, 0, 0
            )
        computed, to_compute = self._prefilling[0]
        budget = self._prefill_budget(rows, computed)
        if jump and to_compute > budget:
            steps = min(to_compute // budget, *self._remaining[:1]) if rows else to_compute // budget
            self._prefilling[0] = [computed + steps * budget, to_compute - steps * budget]
            seconds = self._decode(steps, budget, computed + steps * budget // 2)
            self._start_decoding([prompt for prompt in self._prefilling if prompt[1] == 0])
            return seconds
        tokens = self._prefill(budget)
        seconds = self._decode(1, tokens, computed)
        self._start_decoding([prompt for prompt in self._prefilling if prompt[1] == 0])
        return seconds

    def _prefill_budget(self, rows: int, computed: int) -> int:
        """Return the prompt tokens that the prefill budget allows in a step.

        Results are cached by the prompt's depth in units of 256 tokens.
        """
        num_prompts = len(self._prefilling) + len(self._queue)
        key = rows, computed >> 8, num_prompts // max(rows, 1)
        if key not in self._prefill_budgets:
            max_prefill_tokens = max(self._step_times.max_tokens - rows, 1)
            self._prefill_budgets[key] = min(
                self._step_times.prefill_tokens(rows, self._context, computed, num_prompts), max_prefill_tokens
            )
        return self._prefill_budgets[key]

    def _prefill(self, budget: int) -> int:
        """Take tokens from the oldest prompts first; return how many tokens were available."""
        left = budget
        for prompt in self._prefilling:
            tokens = min(prompt[1], left)
            prompt[0], prompt[1] = prompt[0] + tokens, prompt[1] - tokens
            left -= tokens
        return budget - left

    def _decode(self, steps: int, tokens: int, computed: int) -> float:
        """Simulate `steps` equal steps and return their seconds.

        Each row advances by one token per step, or by `tokens_per_step` with speculation. Finished rows leave.
        """
        rows = len(self._remaining)
        computed_rows = rows if tokens else round(rows * (1 + self._step_times.draft_tokens))
        made = steps if tokens else max(1, round(steps * self._step_times.tokens_per_step))
        seconds = steps * self._step_times.seconds(computed_rows, tokens, self._context + rows * steps // 2, computed)
        stay = [left - made for left in self._remaining if left > made]
        self._context = (self._context + rows * made) * len(stay) // rows if rows else 0
        self._remaining = stay
        return seconds

    def _start_decoding(self, read: list[list[int]]) -> None:
        """Turn prompts that are fully read into decoding rows."""
        if read:
            self._prefilling = [prompt for prompt in self._prefilling if prompt[1] > 0]
            self._context += sum(computed for computed, _ in read)
            self._remaining = sorted(
                [*self._remaining, *(max(1, round(self._typical.completion_tokens)) for _ in read)]
            )


def _expected_remaining_tokens(made: int, most: int, completion_tokens: float) -> int:
    """Return the tokens that a row is expected to generate from now on.

    This is the rest of the typical length, or a typical length more for a row beyond it, but never more than
    `most`.
    """
    usual = completion_tokens - made if made < completion_tokens else completion_tokens
    return max(1, min(most, round(usual)))


def first_token_seconds(
    snapshot: EngineSnapshot, newcomers: list[tuple[float, int]], now: float, typical: TypicalRequest
) -> float | None:
    """Return the seconds from `now` until the last of `newcomers` has its first token, or its vectors.

    Returns None if step times are unknown. Newcomers are requests that the snapshot does not include yet, as
    (time sent, tokens). The current step began with the snapshot, or with the first newcomer if the worker was
    idle, and takes in no other request.
    """
    if snapshot.step_times is None:
        return None
    if snapshot.step_times.steps.encode_points:
        return encode_wait_seconds(snapshot, newcomers, now)
    simulation = SchedulerSimulation(snapshot.step_times, snapshot, typical)
    step_started_at = snapshot.stepped_at
    if simulation.is_idle:
        step_started_at, tokens = newcomers[0]
        simulation.join([tokens])
        newcomers = newcomers[1:]
        if not newcomers:
            return max(simulation.seconds_until_prefilled() - (now - step_started_at), 0.0)
    step_ends_at = max(step_started_at + simulation.step(), now)  # an overdue step may end at any moment
    simulation.join(tokens for _, tokens in newcomers)
    return step_ends_at - now + simulation.seconds_until_prefilled()
