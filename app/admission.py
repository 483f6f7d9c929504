"""Who may come in: a count of open requests against what the plan allows, and how long each would wait for its first token.

Looks at the worker's last snapshot and at what was sent since, and keeps a few running means; the steps themselves are `waiting.py`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from app.errors import Overloaded
from app.measured import Snapshot
from app.waiting import Habits, first_token_seconds

_FIRST_GUESS_TOKENS = 128.0  # of a prompt or a completion, before the first has ended: vLLM's benchmarks' default output length
_GAIN = 0.1  # of a new request in the running means: they look back about ten
# In a crowd that comes between two steps each wait is worked out for so many at once: hundreds would hold up the event loop.
_BURST = 16
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 600.0


class Permit:
    """A place, held from its making until it is first given back, however often that happens."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._num_bytes = 0
        admission.num_open += 1

    def release(self) -> None:
        if self._admission is not None:
            self._admission.num_open -= 1
            self._admission.num_held_bytes -= self._num_bytes
            self._admission = None

    def hold(self, num_bytes: int) -> None:
        """So many bytes are taken until the place is given back. Raises `Overloaded` where others have too many already."""
        assert self._admission is not None, "a place that was given back holds nothing"
        self._admission.check_room(num_bytes)
        self._admission.num_held_bytes += num_bytes
        self._num_bytes = num_bytes

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """Event loop only. `max_running` requests may be computed and `max_waiting` more may queue; the next one is refused."""

    def __init__(self, read_snapshot: Callable[[], Snapshot], clock: Callable[[], float] = time.monotonic) -> None:
        self._read_snapshot = read_snapshot
        self._clock = clock
        self.max_running = 1
        self.max_waiting = 0
        self.num_open = 0
        self.max_held_bytes = 0  # of what open requests ask and are answered; many small bodies can ask for a lot
        self.num_held_bytes = 0
        self._sent: deque[tuple[float, int]] = deque()  # when, and how many tokens to compute; until a snapshot knows of them
        self._prompt_tokens = _FIRST_GUESS_TOKENS
        self._completion_tokens = _FIRST_GUESS_TOKENS
        self._uncached_share = 1.0  # of a prompt's tokens, that have to be computed
        self._told: tuple[tuple[float, int, int], float] | None = (
            None  # behind which step and how many, and the moment that was foretold
        )

    def permit(self) -> Permit:
        """A place for one request, tokenising included. Raises `Overloaded` where all are taken."""
        if self.num_open >= self.max_running + self.max_waiting:
            seconds = self.retry_after_seconds()
            sentence = (
                f"All {self.max_running} places are taken and {self.max_waiting} requests wait; try again in {seconds:.0f} s."
            )
            raise Overloaded(sentence, retry_after_seconds=seconds)
        return Permit(self)

    def check_room(self, num_bytes: int) -> None:
        """Raises `Overloaded` where others hold so many bytes that these are too many; alone a request has the size that it has."""
        if self.num_held_bytes and self.num_held_bytes + num_bytes > self.max_held_bytes:
            seconds = self.retry_after_seconds()
            sentence = (
                f"What waits and its answers take {self.num_held_bytes / 2**20:.0f} MiB; {num_bytes / 2**20:.1f} more are too many. "
                f"Try again in {seconds:.0f} s."
            )
            raise Overloaded(sentence, retry_after_seconds=seconds)

    def send(self, num_prompt_tokens: int) -> float | None:
        """A request goes to the worker now; returns what it will wait for its first token, None where that is not known."""
        predicted = self._predict(num_prompt_tokens)
        self._sent.append((self._clock(), self._uncached(num_prompt_tokens)))
        self._prompt_tokens += _GAIN * (num_prompt_tokens - self._prompt_tokens)
        return predicted

    def observe(self, num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int) -> None:
        """A request has been answered: what the next ones may be like."""
        share = (num_prompt_tokens - num_cached_tokens) / max(num_prompt_tokens, 1)
        self._uncached_share += _GAIN * (share - self._uncached_share)
        self._completion_tokens += _GAIN * (num_completion_tokens - self._completion_tokens)

    def predicted_wait_seconds(self) -> float | None:
        """What a request of the usual length arriving now would wait for its first token; None before the speeds are known."""
        return self._predict(round(self._prompt_tokens))

    def retry_after_seconds(self) -> float:
        """When it makes sense to come back: once those who are here now have their turn."""
        wait = self.predicted_wait_seconds()
        return min(max(wait or 0.0, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _predict(self, num_prompt_tokens: int) -> float | None:
        now, moment = self._read_snapshot(), self._clock()
        while self._sent and self._sent[0][0] <= now.stepped_at:
            self._sent.popleft()
        number = len(self._sent)
        key = (now.stepped_at, number, num_prompt_tokens) if number < _BURST else (now.stepped_at, _BURST + number // _BURST, 0)
        idle = not (number or now.rows or now.prompts or now.queue)  # nothing gets nearer while nobody comes
        if self._told is None or self._told[0] != key or idle:
            newcomers = [*self._sent, (moment, self._uncached(num_prompt_tokens))]
            seconds = first_token_seconds(now, newcomers, moment, Habits(self._completion_tokens, self.max_running))
            self._told = None if seconds is None else (key, moment + seconds)
            return seconds
        return max(self._told[1] - moment, 0.0)

    def _uncached(self, num_prompt_tokens: int) -> int:
        return max(1, round(num_prompt_tokens * self._uncached_share))
