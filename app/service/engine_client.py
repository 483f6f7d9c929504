"""Client of the worker thread: puts requests into its mailbox and routes its events to the open requests.

Everything runs on the event loop. The worker thread only calls `on_events` and `on_worker_exit`.

The steps that every request passes, whatever its kind.

A request is counted in the metrics once, admitted, tokenized in a thread pool and sent to the worker. Used on
the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

from app.errors import InvalidRequest, NotReady, RequestError, RequestTimeout, ServiceStopping, StepFailed
from app.messages import Abort, Command, Event, Grammar, RequestFailed
from app.metrics.instruments import Api, Exemplar, Metrics, Outcome, Refusal, refusal_of
from app.metrics.load_progress import LoadProgress
from app.metrics.stats import EngineSnapshot
from app.service.admission import Admission, Permit
from app.service.rate_limit import ACCOUNT, Account
from app.service.request_log import REQUEST_FIGURES
from app.service.served_model import ServedDecoder, ServingLimits
from app.service.text_pool import TextPool
from app.text.grammar_definition import GrammarSource
from app.tracing.request_trace import RequestTrace

T = TypeVar("T")
# An event of the worker with its arrival time; None when the request has timed out.
TimedEvent = tuple[Event, float] | None
EventCallback = Callable[[TimedEvent], None]


class WorkerInterface(Protocol):
    """Interface of the worker as the service sees it: a mailbox and its state, readable from any thread."""

    @property
    def alive(self) -> bool:
        """True while the worker thread runs."""

    @property
    def state(self) -> str:
        """Lifecycle state, such as `ready`."""

    @property
    def stage(self) -> str:
        """Loading stage in words for people."""

    @property
    def load_progress(self) -> LoadProgress | None:
        """How far the present phase of loading is, if that is known."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """Queue and cache state after the last step."""

    def put(self, command: Command) -> None:
        """Put a command into the mailbox."""


class EngineClient:
    """Client of the worker, bound to the event loop that called `start`."""

    def __init__(self, worker: WorkerInterface, clock: Callable[[], float]) -> None:
        self._worker, self._clock = worker, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counter = count()
        self._callbacks: dict[str, EventCallback] = {}  # keys: the request ids that the worker sees

    def start(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Fail all open requests with `ServiceStopping`."""
        self._fail_open(ServiceStopping("The server is stopping."))

    def name(self, request_id: str) -> str:
        """Return a request id that is unique in this process, whatever id the client sent."""
        return f"{request_id}#{next(self._counter)}"

    @contextmanager
    def register(self, request_id: str, callback: EventCallback, permit: Permit, deadline: float) -> Iterator[None]:
        """Pass the worker's events for one request to `callback` while the block runs.

        At the deadline `callback` receives None, the worker receives an `Abort`, and the permit is released.

        Raises:
            NotReady: the worker has stopped.
        """
        assert self._loop is not None, "start() is called before the first request"
        self._callbacks[request_id] = callback
        timer = self._loop.call_later(deadline - self._clock(), self._expire, request_id, permit)
        try:
            if not self._worker.alive:  # checked after registration: a worker that ends later fails it
                raise NotReady("The engine has stopped; the server is about to end.")
            yield
        finally:
            timer.cancel()
            del self._callbacks[request_id]

    def _expire(self, request_id: str, permit: Permit) -> None:
        """Time out a request.

        Its engine capacity and its place become free at once, even if the reader never looks at the result.
        """
        self._worker.put(Abort(request_id, reason="timeout"))
        permit.release()
        self._callbacks[request_id](None)

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Deliver one step's events with a single wake-up of the event loop. Called from the worker thread."""
        self._call(self._deliver, events)

    def on_worker_exit(self) -> None:
        """Fail all open requests. Called from the worker thread after its last events."""
        self._call(self._fail_open, StepFailed("The engine has stopped; the server is about to end."))

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        if self._loop is None or self._loop.is_closed():
            return  # no event loop, so no open request
        self._loop.call_soon_threadsafe(function, argument)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            callback = self._callbacks.get(event.request_id)
            if callback is not None:
                callback((event, now))

    def _fail_open(self, error: RequestError) -> None:
        self._deliver([RequestFailed(name, error) for name in self._callbacks])


@dataclass(slots=True)
class RequestRecord:
    """Progress of one request.

    `accepted` is true once it was found valid and the worker has it. `count_tokens` returns the tokens of its prompt and
    of its completion so far. The seconds are those from its arrival; None until they are known. `trace` is that of its
    HTTP request, None if it is not sampled; `account` that of its client, None without limits, with `num_reserved` tokens
    for this request; `phase_ends` returns the times at which its phases ended, for the trace.
    """

    arrived_at: float
    count_tokens: Callable[[], tuple[int, int]] = lambda: (0, 0)
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    cached_tokens: int = 0
    account: Account | None = None
    num_reserved: int = 0
    accepted: bool = False
    outcome: Outcome = "failed"
    trace: RequestTrace | None = None
    phase_ends: Callable[[], dict[str, float]] = dict

    def reserve(self, num_tokens: int) -> None:
        """Reserve the tokens that the request may have at most in its client's account.

        Raises:
            RateLimited: The client has not so many left.
        """
        if self.account is not None:
            self.account.reserve(num_tokens)
            self.num_reserved += num_tokens

    @property
    def exemplar(self) -> Exemplar | None:
        """Ids of the span of its HTTP request; None if it is not sampled."""
        return None if self.trace is None else self.trace.exemplar

    def add_to_trace(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Add this request to the trace of its HTTP request, if it is sampled."""
        if self.trace is not None:
            self.trace.add_tokens(prompt_tokens, self.cached_tokens, completion_tokens)
            self.trace.add_times(self.arrived_at, self.phase_ends(), self.first_token_seconds)


class RequestPipeline:
    """The worker with its client, the admission control and the tokenizer's thread pool."""

    def __init__(self, worker: WorkerInterface, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.worker, self.metrics, self.clock = worker, metrics, clock
        self.client = EngineClient(worker, clock)
        self.texts = TextPool()
        self._quick_grammars, self._slow_grammars = TextPool(), TextPool()
        self.admission = Admission(lambda: worker.snapshot, clock, self.texts.wait_seconds)
        self._timeout_seconds = 0.0

    def open(self, limits: ServingLimits) -> None:
        """Apply the limits and start the thread pools. Call it once, before the first request, from any thread."""
        self.admission.open(limits.max_running_seqs, limits.max_waiting_requests, limits.max_held_bytes)
        self._timeout_seconds = limits.request_timeout_seconds
        self.texts.open(limits.tokenizer_threads)
        self._quick_grammars.open(1)
        self._slow_grammars.open(1)

    def close(self) -> None:
        """Fail all open requests and shut down the thread pools."""
        self.client.stop()
        for pool in self._pools:
            pool.close()

    @property
    def _pools(self) -> tuple[TextPool, ...]:
        return (self.texts, self._quick_grammars, self._slow_grammars)

    @property
    def num_reading(self) -> int:
        """Number of requests whose prompt or grammar is read, or waits for a thread."""
        return sum(pool.num_requests for pool in self._pools)

    def deadline(self, record: RequestRecord) -> float:
        """Return the time on `clock` at which the request times out."""
        return record.arrived_at + self._timeout_seconds

    @contextmanager
    def track(self, api: Api) -> Iterator[RequestRecord]:
        """Report the request's outcome to the metrics, its tokens to its client's account, its figures to log and trace.

        This happens however the block ends.
        """
        record, figures = RequestRecord(self.clock(), account=ACCOUNT.get()), REQUEST_FIGURES.get()
        refusal: Refusal | None = None
        if figures is not None and figures.trace is not None:
            record.trace, figures.trace.api = figures.trace, api
        try:
            yield record
        except (GeneratorExit, asyncio.CancelledError):
            record.outcome = "aborted"
            raise
        except RequestError as error:
            refusal = refusal_of(error) if _is_refusal(error, record.accepted) else None
            record.outcome = "timeout" if isinstance(error, RequestTimeout) else "failed"
            if record.trace is not None:
                record.trace.error = record.trace.error or error.code
            raise
        finally:
            prompt, completion = record.count_tokens()
            if record.account is not None:
                record.account.settle(record.num_reserved, prompt + completion)
            if figures is not None:
                figures.add(prompt, completion, record.queue_seconds, record.first_token_seconds)
            record.add_to_trace(prompt, completion)
            if refusal is not None:
                self.metrics.refused(api, refusal)
            else:
                self.metrics.request_lengths(prompt, completion)
                self.metrics.request_ended(api, record.outcome, self.clock() - record.arrived_at, record.exemplar)

    async def read(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` on a text of `num_bytes` in the thread pool, within the request timeout.

        Raises:
            RequestTimeout: it took longer.
        """
        return await self._run(self.texts, num_bytes, function, *arguments)

    async def compile(self, model: ServedDecoder, source: GrammarSource | None) -> Grammar | None:
        """Compile a grammar; None stays None.

        It has a thread of its own, and one for grammars that take longer than most, so prompts and ordinary grammars
        do not wait for those. If the caller is cancelled, the compilation is ended.

        Raises:
            InvalidRequest: The grammar cannot be followed.
            RequestTimeout: It took longer than the request timeout.
        """
        grammars = model.grammars
        if source is None or grammars is None:
            return None
        size = len(source.text) + len(source.alternative)
        compiled = await self._run(self._quick_grammars, size, grammars.compile_quickly, source)
        return compiled or await self._run(self._slow_grammars, size, grammars.compile_slowly, source)

    async def _run(self, pool: TextPool, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await pool.run(num_bytes, function, *arguments)
        except TimeoutError as error:
            raise RequestTimeout("Reading the prompt took longer than the request timeout.") from error


def _is_refusal(error: RequestError, accepted: bool) -> bool:
    """Return whether a request that ended with `error` was refused.

    A request that the worker has accepted can still be refused: the worker may find that it can never be served.
    """
    return isinstance(error, InvalidRequest) or not (accepted or isinstance(error, RequestTimeout))
