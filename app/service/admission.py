"""Admission control: a limit on open requests and on their bytes, and a prediction of the time to first token.

It reads the worker's last snapshot and the list of requests sent since then, and keeps three running means.
`SchedulerSimulation` does the prediction.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from app.errors import Overloaded
from app.metrics.stats import EngineSnapshot
from app.service.wait_estimate import (
    TypicalRequest,
    first_token_seconds,
)

# Prompt and completion length assumed before the first request has finished: vLLM's default output length in
# benchmarks.
_DEFAULT_LENGTH_TOKENS = 128.0
_GAIN = 0.1  # weight of a new request in the running means, which cover about the last ten requests
# When many requests arrive between two steps, this many of them share one prediction: hundreds of simulations would
# block the event loop.
_BURST = 16
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 600.0


class Permit:
    """One place among the open requests, held from construction until the first call of `release`.

    Further calls of `release` have no effect.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._num_bytes = 0
        admission.num_open += 1

    def release(self) -> None:
        """Give back the place and the bytes reserved with it."""
        if self._admission is not None:
            self._admission.num_open -= 1
            self._admission.num_held_bytes -= self._num_bytes
            self._admission = None

    def hold(self, num_bytes: int) -> None:
        """Reserve bytes until the place is given back.

        Raises:
            Overloaded: other requests already hold too many bytes.
        """
        assert self._admission is not None, "bytes cannot be reserved after release"
        self._admission.check_capacity(num_bytes)
        self._admission.num_held_bytes += num_bytes
        self._num_bytes = num_bytes

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """Admission control for one process; used on the event loop only.

    Up to `max_running` requests may be computed and `max_waiting` more may queue. The next request is refused.
    """

    def __init__(
        self, read_snapshot: Callable[[], EngineSnapshot], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_snapshot = read_snapshot
        self._clock = clock
        self.max_running = 1
        self.max_waiting = 0
        self.num_open = 0
        self.max_held_bytes = 0  # limit on inputs and outputs of open requests; small bodies can produce large outputs
        self.num_held_bytes = 0
        # (time sent, tokens to compute) of each request that no snapshot includes yet
        self._sent: deque[tuple[float, int]] = deque()
        self._prompt_tokens = _DEFAULT_LENGTH_TOKENS
        self._completion_tokens = _DEFAULT_LENGTH_TOKENS
        self._uncached_share = 1.0  # share of a prompt's tokens that are not found in the prefix cache
        # last prediction: its key (time of the step, requests sent since, prompt tokens) and the predicted moment
        self._last_prediction: tuple[tuple[float, int, int], float] | None = None

    def open(self, max_running: int, max_waiting: int, max_held_bytes: int) -> None:
        """Set the limits, which are known once the plan is final."""
        self.max_running, self.max_waiting, self.max_held_bytes = max_running, max_waiting, max_held_bytes

    def permit(self) -> Permit:
        """Return a place for one request, valid from tokenization until the response is complete.

        Raises:
            Overloaded: all places are taken.
        """
        if self.num_open >= self.max_running + self.max_waiting:
            seconds = self.retry_after_seconds()
            sentence = f"All {self.max_running} running and {self.max_waiting} waiting places are taken; try again in {seconds:.0f} s."
            raise Overloaded(sentence, retry_after_seconds=seconds)
        return Permit(self)

    def check_capacity(self, num_bytes: int) -> None:
        """Check that a request may hold `num_bytes` in addition to what other requests hold.

        A request that is alone is never refused, whatever its size.

        Raises:
            Overloaded: the sum would exceed `max_held_bytes`.
        """
        if self.num_held_bytes and self.num_held_bytes + num_bytes > self.max_held_bytes:
            seconds = self.retry_after_seconds()
            sentence = (
                f"Open requests and their responses hold {self.num_held_bytes / 2**20:.0f} MiB; {num_bytes / 2**20:.1f} MiB more "
                f"exceed the limit. Try again in {seconds:.0f} s."
            )
            raise Overloaded(sentence, retry_after_seconds=seconds)

    def send(self, num_prompt_tokens: int) -> float | None:
        """Record that a request goes to the worker now and return its predicted time to first token in seconds.

        Returns None when step times are not known yet.
        """
        predicted = self._predict(num_prompt_tokens)
        self._sent.append((self._clock(), self._uncached_tokens(num_prompt_tokens)))
        self._prompt_tokens += _GAIN * (num_prompt_tokens - self._prompt_tokens)
        return predicted

    def observe(self, num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int) -> None:
        """Update the running means with the token counts of a completed request."""
        share = (num_prompt_tokens - num_cached_tokens) / max(num_prompt_tokens, 1)
        self._uncached_share += _GAIN * (share - self._uncached_share)
        self._completion_tokens += _GAIN * (num_completion_tokens - self._completion_tokens)

    def predicted_wait_seconds(self) -> float | None:
        """Return the predicted time to first token of a request of average length that arrives now.

        Returns None before step times are known.
        """
        return self._predict(round(self._prompt_tokens))

    def retry_after_seconds(self) -> float:
        """Return the time after which a refused client should retry: when the requests now open are served."""
        wait = self.predicted_wait_seconds()
        return min(max(wait or 0.0, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

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
