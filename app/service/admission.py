"""Admission control: a limit on open requests and on their bytes, and a prediction of the time to first token.

The prediction simulates the steps until the first token on counts alone, with the engine's own rules and current step
times, from the worker's last snapshot and the requests sent since then.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from operator import attrgetter

from app.engine.encoder.batching import TextCapacity, share_step
from app.engine.scheduler.policy import admit_oldest, before_long_ones, share_in_order, share_prompts, size_class
from app.errors import Overloaded
from app.hardware.step_times import StepTimes
from app.metrics.steps import EngineSnapshot

# Prompt and completion length assumed before the first request has finished: vLLM's default output length in
# benchmarks.
_DEFAULT_LENGTH_TOKENS = 128.0
_GAIN = 0.1  # weight of a new request in the running means, which cover about the last ten requests
# When many requests arrive between two steps, this many of them share one prediction: hundreds of simulations would
# block the event loop.
_BURST = 16
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 600.0
_MAX_EVENTS = 60  # simulated events, each one step or many equal steps; beyond them the result is extrapolated
_num_uncomputed, _num_tokens = attrgetter("num_uncomputed"), attrgetter("num_tokens")


class OpenCounts:
    """Counts of a model's open requests, in memory that the processes which serve it share.

    Each process adds to a row of its own and reads the sums, so no lock is needed, and the row of one that has ended
    can be cleared. Two processes that take the last place within the same microseconds may both get it.
    """

    OPEN, HELD_BYTES, ENTERED, USED_AT, READING, NUM_COLUMNS = range(6)

    def __init__(self, memory: memoryview | None = None, own: int = 0) -> None:
        self._values = memoryview(bytearray(8 * self.NUM_COLUMNS)).cast("q") if memory is None else memory
        self._own = own * self.NUM_COLUMNS

    @classmethod
    def num_values(cls, num_processes: int) -> int:
        return cls.NUM_COLUMNS * num_processes

    def add(self, column: int, amount: int) -> None:
        self._values[self._own + column] += amount

    def set(self, column: int, value: int) -> None:
        self._values[self._own + column] = value

    def note_use(self) -> None:
        self.set(self.USED_AT, time.monotonic_ns())

    def own(self, column: int) -> int:
        return self._values[self._own + column]

    def each(self, column: int) -> list[int]:
        return self._values[column :: self.NUM_COLUMNS].tolist()

    def total(self, column: int) -> int:
        return sum(self.each(column))

    def clear(self, number: int) -> list[int]:
        """Set the row of a process to zero, and return what it was."""
        first = number * self.NUM_COLUMNS
        row = self._values[first : first + self.NUM_COLUMNS]
        was = row.tolist()
        for column in range(self.NUM_COLUMNS):
            row[column] = 0
        return was


class Permit:
    """One place among the open requests, held from construction until `release`. Further releases have no effect."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._num_bytes = 0
        admission.counts.add(OpenCounts.OPEN, 1)

    def release(self) -> None:
        if self._admission is not None:
            counts = self._admission.counts
            counts.add(OpenCounts.OPEN, -1)
            counts.add(OpenCounts.HELD_BYTES, -self._num_bytes)
            self._admission = None

    def hold(self, num_bytes: int) -> None:
        """Reserve bytes until the place is given back. Raises `Overloaded` if other requests hold too many."""
        assert self._admission is not None, "bytes cannot be reserved after release"
        self._admission.check_capacity(num_bytes)
        self._admission.counts.add(OpenCounts.HELD_BYTES, num_bytes)
        self._num_bytes = num_bytes

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """Admission control of a model, by counts that the processes which serve it share; used on the event loop only.

    Up to `max_running` requests may be computed and `max_waiting` more may queue. The next request is refused.
    """

    def __init__(
        self,
        read_snapshot: Callable[[], EngineSnapshot],
        clock: Callable[[], float] = time.monotonic,
        reading_seconds: Callable[[], float] = lambda: 0.0,
        counts: OpenCounts | None = None,
    ) -> None:
        self.counts = counts or OpenCounts()
        self._read_snapshot = read_snapshot
        self._clock = clock
        self._reading_seconds = reading_seconds  # time until the texts of open requests are tokenized
        self.max_running = 1
        self.max_waiting = 0
        self.max_held_bytes = 0  # limit on inputs and outputs of open requests; small bodies can produce large outputs
        # (time sent, tokens to compute) of each request that no snapshot includes yet
        self._sent: deque[tuple[float, int]] = deque()
        self._prompt_tokens = _DEFAULT_LENGTH_TOKENS
        self._completion_tokens = _DEFAULT_LENGTH_TOKENS
        self._uncached_share = 1.0  # share of a prompt's tokens that are not found in the prefix cache
        # last prediction: its key (time of the step, requests sent since, prompt tokens) and the predicted moment
        self._last_prediction: tuple[tuple[float, int, int], float] | None = None

    def open(self, max_running: int, max_waiting: int, max_held_bytes: int) -> None:
        self.max_running, self.max_waiting, self.max_held_bytes = max_running, max_waiting, max_held_bytes

    @property
    def num_open(self) -> int:
        return self.counts.total(OpenCounts.OPEN)

    @property
    def num_held_bytes(self) -> int:
        return self.counts.total(OpenCounts.HELD_BYTES)

    def permit(self) -> Permit:
        """Return a place from tokenization to the complete response. Raises `Overloaded` if all are taken."""
        if self.num_open >= self.max_running + self.max_waiting:
            seconds = self.retry_after_seconds()
            sentence = f"All {self.max_running} running and {self.max_waiting} waiting places are taken; try again in {seconds:.0f} s."
            raise Overloaded(sentence, retry_after_seconds=seconds)
        return Permit(self)

    def check_capacity(self, num_bytes: int) -> None:
        """Raise `Overloaded` if this request and the others hold too many bytes. One that is alone is never refused."""
        held = self.num_held_bytes
        if held and held + num_bytes > self.max_held_bytes:
            seconds = self.retry_after_seconds()
            sentence = (
                f"Open requests and their responses hold {held / 2**20:.0f} MiB; {num_bytes / 2**20:.1f} MiB more "
                f"exceed the limit. Try again in {seconds:.0f} s."
            )
            raise Overloaded(sentence, retry_after_seconds=seconds)

    def send(self, num_prompt_tokens: int, is_predicted: bool = True) -> float | None:
        """Record a request and return its predicted seconds to the first token; None until step times are known."""
        predicted = self._predict(num_prompt_tokens) if is_predicted else None
        self._sent.append((self._clock(), self._uncached_tokens(num_prompt_tokens)))
        self._prompt_tokens += _GAIN * (num_prompt_tokens - self._prompt_tokens)
        return predicted

    def observe(self, num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int) -> None:
        share = (num_prompt_tokens - num_cached_tokens) / max(num_prompt_tokens, 1)
        self._uncached_share += _GAIN * (share - self._uncached_share)
        self._completion_tokens += _GAIN * (num_completion_tokens - self._completion_tokens)

    def predicted_wait_seconds(self) -> float | None:
        """Return the predicted time to first token of an average request; None until step times are known."""
        predicted = self._predict(round(self._prompt_tokens))
        return None if predicted is None else predicted + self._reading_seconds()

    def retry_after_seconds(self) -> float:
        """Return when a refused client should retry: when the requests now open are served."""
        wait = self.predicted_wait_seconds() or self._reading_seconds()
        return min(max(wait, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _predict(self, num_prompt_tokens: int) -> float | None:
        snapshot, now = self._read_snapshot(), self._clock()
        while self._sent and self._sent[0][0] <= snapshot.stepped_at:
            self._sent.popleft()
        num_sent = len(self._sent)
        key = (
            (snapshot.stepped_at, num_sent, num_prompt_tokens)
            if num_sent < _BURST
            else (snapshot.stepped_at, _BURST + num_sent // _BURST, 0)
        )
        # An idle worker's predicted wait does not shrink with time.
        idle = not (num_sent or snapshot.rows or snapshot.prompts or snapshot.queue)
        if self._last_prediction is None or self._last_prediction[0] != key or idle:
            newcomers = [*self._sent, (now, self._uncached_tokens(num_prompt_tokens))]
            seconds = first_token_seconds(
                snapshot, newcomers, now, TypicalRequest(self._completion_tokens, self.max_running)
            )
            self._last_prediction = None if seconds is None else (key, now + seconds)
            return seconds
        return max(self._last_prediction[1] - now, 0.0)

    def _uncached_tokens(self, num_prompt_tokens: int) -> int:
        return max(1, round(num_prompt_tokens * self._uncached_share))


# ---- predicted wait ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """Assumptions about requests: tokens of a completion, and how many sequences may run."""

    completion_tokens: float
    max_running: int


def first_token_seconds(
    snapshot: EngineSnapshot, newcomers: list[tuple[float, int]], now: float, typical: TypicalRequest
) -> float | None:
    """Return the seconds from `now` until the last newcomer has its first token, or its vectors.

    None if step times are unknown. Newcomers are requests that the snapshot does not include yet, as (time sent,
    tokens). The current step began with the snapshot, or with the first newcomer if the worker was idle, and takes in
    no other.
    """
    if snapshot.step_times is None:
        return None
    simulation: SchedulerSimulation | TextQueueSimulation
    if snapshot.step_times.steps.encode_points:
        simulation = TextQueueSimulation(snapshot.step_times, snapshot.queue)
    else:
        simulation = SchedulerSimulation(snapshot.step_times, snapshot, typical)
    step_started_at = snapshot.stepped_at
    if simulation.is_idle:
        step_started_at, tokens = newcomers[0]
        simulation.join([tokens])
        newcomers = newcomers[1:]
        if not newcomers:
            return max(simulation.seconds_until_last() - (now - step_started_at), 0.0)
    step_ends_at = max(step_started_at + simulation.step(), now)  # an overdue step may end at any moment
    simulation.join(tokens for _, tokens in newcomers)
    return step_ends_at - now + simulation.seconds_until_last()


@dataclass(slots=True, eq=False)
class SimulatedPrompt:
    num_computed: int
    num_uncomputed: int


class SchedulerSimulation:
    """A dry run of the scheduler on counts, with its own rules for the prefill budget, order and admission.

    Steps that are alike are counted at once.
    """

    def __init__(self, step_times: StepTimes, snapshot: EngineSnapshot, typical: TypicalRequest) -> None:
        self._step_times, self._typical = step_times, typical
        self._remaining = sorted(
            _expected_remaining_tokens(made, most, typical.completion_tokens) for made, most in snapshot.rows
        )  # tokens to generate, per row
        self._context = snapshot.context_tokens
        self._prompts = [SimulatedPrompt(computed, to_compute) for computed, to_compute in snapshot.prompts]
        self._queue = [SimulatedPrompt(0, tokens) for tokens in snapshot.queue]
        self._uncomputed = sum(prompt.num_uncomputed for prompt in chain(self._prompts, self._queue))
        self._last = (self._queue or self._prompts or [SimulatedPrompt(0, 0)])[-1]
        self._prefill_budgets: dict[tuple[int, int, int], int] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._remaining or self._prompts or self._queue)

    def join(self, prompts: Iterable[int]) -> None:
        for tokens in prompts:
            self._last = SimulatedPrompt(0, tokens)
            self._queue.append(self._last)
            self._uncomputed += tokens

    def step(self) -> float:
        return self._step(jump=False)

    def seconds_until_last(self) -> float:
        seconds, before = 0.0, self._uncomputed
        for _ in range(_MAX_EVENTS):
            if not self._last.num_uncomputed:
                return seconds
            seconds += self._step(jump=True)
        return seconds * before / max(before - self._uncomputed, 1)

    def _step(self, jump: bool) -> float:
        rows = len(self._remaining)
        free_places = self._typical.max_running - rows - len(self._prompts)
        shares: list[tuple[SimulatedPrompt, int]] = []
        if self._prompts or (self._queue and free_places > 0):
            budget = self._prefill_budget(rows, self._prompts[0].num_computed if self._prompts else 0)
            admitted = admit_oldest(free_places, lambda: 1 if self._queue else 0, self._admit)
            in_order = chain(tuple(self._prompts), admitted)
            shares = list(
                share_prompts(in_order, budget, _num_uncomputed, lambda oldest: self._smaller(oldest, budget))
            )
        if not shares:
            repeats = ceil(self._remaining[0] / self._step_times.tokens_per_step) if jump and rows else 1
            return self._decode(repeats, 0, 0)
        last, given = shares[-1]
        repeats, depth = 1, last.num_computed
        if jump and last.num_uncomputed > given:  # the step is repeated until a prompt or a row ends
            repeats = min([*(prompt.num_uncomputed // each for prompt, each in shares), *self._remaining[:1]])
            depth += repeats * given // 2
        for prompt, each in shares:
            prompt.num_computed += repeats * each
            prompt.num_uncomputed -= repeats * each
            self._uncomputed -= repeats * each
        seconds = self._decode(repeats, sum(each for _, each in shares), depth)
        self._start_decoding()
        return seconds

    def _admit(self) -> SimulatedPrompt:
        self._prompts.append(self._queue.pop(0))
        return self._prompts[-1]

    def _smaller(self, oldest: SimulatedPrompt, budget: int) -> Iterator[SimulatedPrompt]:
        """Yield the prompts that go before the rest of the oldest one; a queued one is admitted when it is taken."""
        others = chain(self._prompts[self._prompts.index(oldest) + 1 :], self._queue)
        for prompt in before_long_ones(others, oldest.num_uncomputed, budget, _num_uncomputed):
            if prompt not in self._prompts:
                if self._typical.max_running <= len(self._remaining) + len(self._prompts):
                    continue
                self._queue.remove(prompt)
                self._prompts.append(prompt)
            yield prompt

    def _prefill_budget(self, rows: int, computed: int) -> int:
        """Return a step's budget of prompt tokens. Results are cached by the prompt's depth in units of 256 tokens."""
        num_prompts = len(self._prompts) + len(self._queue)
        key = rows, computed >> 8, num_prompts // max(rows, 1)
        if key not in self._prefill_budgets:
            max_prefill_tokens = max(self._step_times.max_tokens - rows, 1)
            self._prefill_budgets[key] = min(
                self._step_times.prefill_tokens(rows, self._context, computed, num_prompts), max_prefill_tokens
            )
        return self._prefill_budgets[key]

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

    def _start_decoding(self) -> None:
        done = [prompt for prompt in self._prompts if not prompt.num_uncomputed]
        if done:
            self._prompts = [prompt for prompt in self._prompts if prompt.num_uncomputed]
            self._context += sum(prompt.num_computed for prompt in done)
            completion_tokens = max(1, round(self._typical.completion_tokens))
            self._remaining = sorted([*self._remaining, *[completion_tokens] * len(done)])


def _expected_remaining_tokens(made: int, most: int, completion_tokens: float) -> int:
    """Return the tokens that a row is expected to generate from now on, at most `most`.

    This is the rest of the typical length, or a typical length more for a row beyond it.
    """
    usual = completion_tokens - made if made < completion_tokens else completion_tokens
    return max(1, min(most, round(usual)))


@dataclass(slots=True)
class TokenCount:
    """The tokens of one request of an encoder, or of several that are served alike; `share_step` takes parts of it."""

    num_tokens: int
    fixed_class: int | None = None  # size class; None if it depends on the number of tokens

    longest = 0  # counts can be split anywhere

    def size_class(self, step_tokens: int) -> int:
        if self.fixed_class is not None:
            return self.fixed_class
        return 0 if self.num_tokens <= step_tokens else size_class(self.num_tokens, step_tokens)

    def take(self, capacity: TextCapacity) -> list[TokenCount]:
        tokens = min(self.num_tokens, capacity.tokens)
        self.num_tokens -= tokens
        return [TokenCount(tokens)]


class TextQueueSimulation:
    """A dry run of the queue of an encoder or a program on counts.

    `share_step` takes the texts of a step as the engine's queue does, and `share_in_order` the rows of a program.
    """

    def __init__(self, step_times: StepTimes, queue: Iterable[int]) -> None:
        self._step_times = step_times
        self._queue = [tokens for tokens in queue if tokens > 0]  # of each request

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def join(self, requests: Iterable[int]) -> None:
        self._queue.extend(requests)

    def step(self) -> float:
        total = sum(self._queue)
        if total <= self._step_times.max_tokens:  # all of it is in one step
            self._queue.clear()
            return self._step_times.encode(total)
        requests = [TokenCount(tokens) for tokens in self._queue]
        taken = self._take(requests)
        self._queue = [request.num_tokens for request in requests if request.num_tokens]
        return self._step_times.encode(taken)

    def seconds_until_last(self) -> float:
        """Return the seconds until the last request of the queue has all its texts.

        The requests of no larger size class go before it; they count as one request together with it. So do all larger
        ones, which are taken to be older. Steps that are alike are counted at once.
        """
        total = own = sum(self._queue)
        step_tokens = self._step_times.max_tokens
        if total <= step_tokens:
            return self._step_times.encode(total)
        if not self._step_times.oldest_first:
            last = size_class(self._queue[-1], step_tokens)
            own = sum([tokens for tokens in self._queue if size_class(tokens, step_tokens) <= last])
        larger, ahead = TokenCount(total - own, fixed_class=1), TokenCount(own, fixed_class=0)
        seconds = 0.0
        while ahead.num_tokens:
            requests = [request for request in (larger, ahead) if request.num_tokens]
            before = [request.num_tokens for request in requests]
            tokens = self._take(requests)
            taken = [number - request.num_tokens for number, request in zip(before, requests, strict=True)]
            more = min(request.num_tokens // each for request, each in zip(requests, taken, strict=True) if each)
            for request, each in zip(requests, taken, strict=True):
                request.num_tokens -= more * each
            seconds += (1 + more) * self._step_times.encode(tokens)
        return seconds

    def _take(self, requests: Sequence[TokenCount]) -> int:
        max_tokens = self._step_times.max_tokens
        if not self._step_times.oldest_first:
            return sum(taken.num_tokens for taken in share_step(requests, TextCapacity(max_tokens, sys.maxsize)))
        shares = list(share_in_order(requests, max_tokens, _num_tokens))
        return sum(taken.num_tokens for request, each in shares for taken in request.take(TextCapacity(each, 1)))
