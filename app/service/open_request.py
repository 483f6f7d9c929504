"""The life of a request in the service, from its arrival to its end, whatever its kind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from app.errors import InvalidRequest, RequestError, RequestTimeout
from app.messages import (
    Abort,
    Encode,
    EngineRequest,
    Event,
    Generate,
    Infer,
    LoadedAdapter,
    RequestFailed,
    RunTask,
    Timings,
)
from app.metrics.instruments import Api, Exemplar, Outcome, Refusal, refusal_of
from app.service.adapters import Adapter, Adapters
from app.service.admission import Permit
from app.service.engine_client import EngineClient, TimedEvent
from app.service.request_log import ClientRequest

# The phase of a trace in which the engine computes: for a completion, what comes before its first token.
_COMPUTES: Mapping[type[EngineRequest], str] = {Generate: "prefill", Encode: "encode", Infer: "infer", RunTask: "infer"}


class OpenRequest:
    """A request that has arrived and not ended. It is open while a `with` block runs.

    The block calls, in this order: `use_adapter`, `admit`, `reserve` and `hold` once the size is known, `send`, and
    `next_event` until the answer is complete. Each may raise a `RequestError`. However the block ends, the request ends
    once: the worker forgets it, its place, bytes, tokens and adapter are given back, and it is counted, logged and
    traced.

    The block counts the tokens, and sets `outcome` when the answer is complete and `is_over` when the worker has
    nothing left to compute for it. `timings` are those of the first result; None before.
    """

    def __init__(self, client: EngineClient, api: Api, http: ClientRequest) -> None:
        self.client, self.api, self.http = client, api, http
        self.arrived_at = client.clock()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_completion_tokens = 0
        self.timings: Timings | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.outcome: Outcome = "failed"
        self._refusal: Refusal | None = None
        self.exemplar: Exemplar | None = None
        self._num_reserved = 0
        self._adapter: tuple[Adapters, Adapter] | None = None
        self._permit: Permit | None = None
        self._events: deque[TimedEvent] = deque()
        self._waiting: asyncio.Future[None] | None = None  # the reader's, for the next event
        self._command: EngineRequest | None = None  # from `send` on
        self._timer: asyncio.TimerHandle | None = None
        self._predicted: tuple[float, float] | None = None  # seconds to the first token, and when they were predicted
        self._is_accepted = self.is_over = False
        if http.trace is not None:
            self.exemplar, http.trace.api = http.trace.exemplar, api

    def __enter__(self) -> Self:
        return self

    # ---- before it is sent -----------------------------------------------------------------------------------------

    def use_adapter(self, adapters: Adapters, name: str) -> LoadedAdapter:
        """Keep an adapter loaded until the end. Raises `ModelNotFound` if it is not served."""
        self._adapter = adapters, adapters.acquire(name)
        return self._adapter[1].loaded

    def admit(self) -> None:
        """Take a place among the open requests. Raises `Overloaded` if there is none."""
        self._permit = self.client.admission.permit()

    async def reserve(self, num_tokens: int) -> None:
        """Reserve the most tokens that it may have in its client's account. Raises `RateLimited`."""
        if self.http.account is not None:
            await self.http.account.reserve(num_tokens)
            self._num_reserved += num_tokens

    def hold(self, num_bytes: int) -> None:
        """Reserve the bytes that it holds. Raises `Overloaded` if other requests hold too many."""
        assert self._permit is not None, "a request is admitted before it holds bytes"
        self._permit.hold(num_bytes)

    # ---- in the worker ---------------------------------------------------------------------------------------------

    def send(self, command: EngineRequest, num_tokens: int) -> None:
        """Send it to the worker, which computes so many tokens, or rows, until the first result.

        Raises `NotReady` if the worker has stopped, and `ServiceStopping` if it is about to.
        """
        client = self.client
        deadline = self.arrived_at + client.timeout_seconds
        self._timer = client.register(command.request_id, self.arrive, self._expire, deadline)
        self._command = command
        seconds = client.note_sent(num_tokens)
        self._predicted = None if seconds is None else (seconds, client.clock())
        client.worker.put(command)
        self._is_accepted = True

    def _expire(self) -> None:
        """Time out. Its engine capacity and its place become free at once, even if nobody looks at the result."""
        assert self._command is not None and self._permit is not None, "the timer starts when the request is sent"
        self.client.worker.put(Abort(self._command.request_id, reason="timeout"))
        self._permit.release()
        self.arrive(None)

    def arrive(self, timed_event: TimedEvent) -> None:
        """Take an event of the worker, or None when the request times out."""
        self._events.append(timed_event)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next_event(self) -> tuple[Event, float] | None:
        """Return the worker's next event and its time; None after a timeout. Raises the error of a `RequestFailed`."""
        while not self._events:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self.checked(self._events.popleft())

    def checked(self, timed_event: TimedEvent) -> TimedEvent:
        if timed_event is None:
            self.is_over = True
        elif isinstance(timed_event[0], RequestFailed):
            raise timed_event[0].error.with_traceback(None)
        return timed_event

    def note_first_result(self, timings: Timings, now: float) -> None:
        self.timings = timings
        if self._predicted is not None:
            self.client.metrics.wait_measured(self._predicted[0], now - self._predicted[1])

    # ---- its end ---------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave_worker()
        if self._permit is not None:
            self._permit.release()
        if self._adapter is not None:
            adapters, adapter = self._adapter
            adapters.release(adapter)
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            self.outcome = "aborted"
        elif isinstance(error, RequestError):
            self._note_error(error)
        self._report()

    def _leave_worker(self) -> None:
        if self._timer is None or self._command is None:
            return
        self._timer.cancel()
        self.client.unregister(self._command.request_id)
        if self._is_accepted and not self.is_over:
            self.client.worker.put(Abort(self._command.request_id))

    def _note_error(self, error: RequestError) -> None:
        """Note the error that its client gets. The worker too can find that a request can never be served."""
        self.http.error = error.code
        if self.http.trace is not None:
            self.http.trace.error = self.http.trace.error or error.code
        if isinstance(error, RequestTimeout):
            self.outcome = "timeout"
        elif isinstance(error, InvalidRequest) or not self._is_accepted:
            self._refusal = refusal_of(error)

    def _report(self) -> None:
        http, metrics = self.http, self.client.metrics
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        first_token_seconds = None if self.first_token_at is None else self.first_token_at - self.arrived_at
        if http.account is not None:
            http.account.settle(self._num_reserved, prompt + completion)
        queue_seconds = None if self.timings is None else self.timings.queue_seconds
        http.add(prompt, completion, queue_seconds, first_token_seconds)
        if http.trace is not None:
            http.trace.add_tokens(prompt, self.num_cached_tokens, completion)
            http.trace.add_times(self.arrived_at, self._phase_ends(), first_token_seconds)
        if self._refusal is not None:
            metrics.refused(self.api, self._refusal)
            return
        metrics.request_lengths(prompt, completion)
        metrics.request_ended(self.api, self.outcome, self.client.clock() - self.arrived_at, self.exemplar)

    def _phase_ends(self) -> dict[str, float]:
        """Return when its phases have ended, as far as they have begun; the decode with the last token."""
        if self.timings is None or self._command is None:
            return {}
        started = self.arrived_at + self.timings.queue_seconds
        seconds = self.timings.prefill_seconds + self.timings.encode_seconds
        ends = {"queue": started, _COMPUTES[type(self._command)]: started + seconds}
        is_decoded = self.first_token_at is not None and self.last_token_at != self.first_token_at
        return ends | {"decode": self.last_token_at} if is_decoded else ends
