"""Who may come in: a count of open requests against what the plan allows, and how long it would take to be served.

The arithmetic of waiting, for `Retry-After` and the metrics; it looks at the worker's last snapshot and keeps two running means.
"""

from __future__ import annotations

from collections.abc import Callable

from app.errors import Overloaded
from app.messages import Snapshot

_FIRST_GUESS_TOKENS = 128.0  # of a completion, before the first has ended: vLLM's benchmarks' default output length
_GAIN = 0.1  # of a new request in the running means: they look back about ten
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 600.0


class Permit:
    """A place, held from its making until it is first given back, however often that happens."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        admission.num_open += 1

    def release(self) -> None:
        if self._admission is not None:
            self._admission.num_open -= 1
            self._admission = None

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """Event loop only. `max_running` requests may be computed and `max_waiting` more may queue; the next one is refused."""

    def __init__(self, read_snapshot: Callable[[], Snapshot]) -> None:
        self._read_snapshot = read_snapshot
        self.max_running = 1
        self.max_waiting = 0
        self.num_open = 0
        self._prompt_tokens = 0.0
        self._completion_tokens = _FIRST_GUESS_TOKENS

    def permit(self) -> Permit:
        """A place for one request, tokenising included. Raises `Overloaded` where all are taken."""
        if self.num_open >= self.max_running + self.max_waiting:
            seconds = self.retry_after_seconds()
            sentence = (
                f"All {self.max_running} places are taken and {self.max_waiting} requests wait; try again in {seconds:.0f} s."
            )
            raise Overloaded(sentence, retry_after_seconds=seconds)
        return Permit(self)

    def observe(self, num_uncached_prompt_tokens: int, num_completion_tokens: int) -> None:
        """A request has been answered: what the next ones may be like."""
        self._prompt_tokens += _GAIN * (num_uncached_prompt_tokens - self._prompt_tokens)
        self._completion_tokens += _GAIN * (num_completion_tokens - self._completion_tokens)

    def predicted_wait_seconds(self) -> float | None:
        """What a request arriving now would wait for its first token; None before the speeds are known.

        The prompts before it and its own are read at the measured speed. Where all places are taken, one becomes free each time
        that a whole completion's tokens have been made, and those who wait already go first.
        """
        now = self._read_snapshot()
        if not now.prefill_tokens_per_second:
            return None
        reading = (now.waiting_prompt_tokens + self._prompt_tokens) / now.prefill_tokens_per_second
        turns = now.num_waiting + 1 if now.num_running >= self.max_running else 0
        if not turns or not now.decode_tokens_per_second:
            return reading
        return reading + turns * self._completion_tokens / now.decode_tokens_per_second

    def retry_after_seconds(self) -> float:
        """When it makes sense to come back: once those who are here now have their turn."""
        wait = self.predicted_wait_seconds()
        return min(max(wait or 0.0, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
