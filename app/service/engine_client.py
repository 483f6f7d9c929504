"""What all requests share: the worker's mailbox and events, admission, the threads that read prompts, and a request's life.

Everything runs on the event loop. The worker thread only calls `on_events` and `on_worker_exit`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from app.errors import InvalidRequest, NotReady, RequestError, RequestTimeout, ServiceStopping
from app.messages import (
    Abort,
    Command,
    Encode,
    EngineRequest,
    Event,
    Generate,
    GrammarSource,
    Infer,
    LoadedAdapter,
    RequestFailed,
    RunTask,
    Timings,
)
from app.metrics.instruments import Api, Exemplar, Metrics, Outcome, Refusal, refusal_of
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot
from app.service.adapters import Adapter, Adapters
from app.service.admission import Admission, OpenCounts, Permit
from app.service.pictures import ReadPicture, check_pictures
from app.service.requests import ClientRequest, Picture
from app.service.served_model import ServedDecoder, ServingLimits
from app.text.child_process import CANCELLED
from app.text.grammar import CompiledGrammar

T = TypeVar("T")
# An event of the worker with its arrival time; None when the request has timed out.
TimedEvent = tuple[Event, float] | None

# Within so many seconds, the wait of one request is predicted, for its error: that takes 30 to 100 µs of the event loop.
_PREDICTION_SECONDS = 0.1
_GAIN = 0.1  # weight of a new text in the running mean
# Of the threads that read pictures: while tokens are computed too, they get about a quarter of the time.
_PICTURES_NICENESS = 5
_MIN_TIMED_BYTES = 1_000  # of a shorter text, starting the thread takes most of the time


class WorkerInterface(Protocol):
    """The worker as the service sees it: a mailbox and its state, readable from any thread."""

    @property
    def alive(self) -> bool: ...

    @property
    def state(self) -> str: ...

    @property
    def stage(self) -> str: ...

    @property
    def load_progress(self) -> LoadProgress | None: ...

    @property
    def snapshot(self) -> EngineSnapshot: ...

    def put(self, command: Command) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Which of the processes that serve a model this one is, and the requests that they count together."""

    number: int = 0
    num_processes: int = 1
    counts: OpenCounts = field(default_factory=OpenCounts)


class EngineClient:
    """Client of the worker, bound to the event loop that called `start`."""

    def __init__(
        self, worker: WorkerInterface, metrics: Metrics, clock: Callable[[], float], place: ProcessPlace | None = None
    ) -> None:
        place = place or ProcessPlace()
        self.worker, self.metrics, self.clock = worker, metrics, clock
        self.texts = TextPool()
        self._quick_grammars, self._slow_grammars, self._pictures = TextPool(), TextPool(), TextPool()
        self.admission = Admission(lambda: worker.snapshot, clock, self.texts.wait_seconds, place.counts)
        self.timeout_seconds = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._counter = count(place.number, place.num_processes)
        self._predicted_at = -math.inf
        self._steps: deque[Sequence[Event]] = deque()
        self._is_woken = False
        self.is_late = False  # while several steps are delivered, whose tokens are written together
        self._writes: list[Callable[[], None]] = []
        # Of tokens of these steps that were taken directly: their number, and seconds since each choice's previous one.
        self.num_direct, self.direct_gaps = 0, list[float]()
        self._listeners: dict[str, Callable[[TimedEvent], None]] = {}  # keys: the request ids that the worker sees

    def open(self, limits: ServingLimits) -> None:
        """Apply the limits and start the thread pools. Call it once, before the first request, from any thread."""
        self.admission.open(limits.max_running_seqs, limits.max_waiting_requests, limits.max_held_bytes)
        seconds = self.timeout_seconds = limits.request_timeout_seconds
        self.texts.open(limits.tokenizer_threads, seconds)
        self._quick_grammars.open(1, seconds)
        self._slow_grammars.open(1, seconds)
        self._pictures.open(1, seconds, _PICTURES_NICENESS)

    def start(self) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()

    def close(self) -> None:
        """Fail all open requests with `ServiceStopping`."""
        self._fail_open(ServiceStopping("The server is stopping."))
        for pool in self._pools:
            pool.close()

    @property
    def _pools(self) -> tuple[TextPool, ...]:
        return (self.texts, self._quick_grammars, self._slow_grammars, self._pictures)

    @property
    def num_reading(self) -> int:
        """Number of requests with a prompt or grammar that is read here or waits for a thread."""
        return sum(pool.num_requests for pool in self._pools)

    @property
    def num_reading_anywhere(self) -> int:
        """The same of all processes; the others note it from time to time."""
        counts = self.admission.counts
        return self.num_reading + counts.total(OpenCounts.READING) - counts.own(OpenCounts.READING)

    def note_reading(self) -> None:
        self.admission.counts.set(OpenCounts.READING, self.num_reading)

    # ---- before a request is sent ----------------------------------------------------------------------------------

    async def read(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` on a text of `num_bytes` in a thread. Raises `RequestTimeout` after the request timeout."""
        return await self.texts.run(num_bytes, function, *arguments)

    async def look(self, model: ServedDecoder, pictures: Sequence[Picture]) -> list[ReadPicture]:
        """Return the vectors of pictures, which one thread reads. Raises `InvalidRequest` and `RequestTimeout`."""
        if not pictures:
            return []
        reader = check_pictures(model.pictures, model.no_pictures, pictures)
        try:
            async with asyncio.timeout(self.timeout_seconds), reader.fetcher.fetched(pictures) as given:
                with reader.waiting(given):
                    return await self._pictures.run(sum(len(one.data) for one in given), reader.read, given)
        except TimeoutError as error:
            raise _slow_prompt() from error

    async def compile(self, model: ServedDecoder, source: GrammarSource | None) -> CompiledGrammar | None:
        """Compile a grammar; None stays None. A cancelled caller ends the compilation.

        It has a thread of its own, and one for grammars that take longer than most, so prompts and ordinary grammars do
        not wait. Raises `InvalidRequest` if the grammar cannot be followed, and `RequestTimeout`.
        """
        grammars = model.grammars
        if source is None or grammars is None:
            return None
        size = len(source.text) + len(source.alternative)
        compiled = await self._quick_grammars.run(size, grammars.compile_quickly, source)
        return compiled or await self._slow_grammars.run(size, grammars.compile_slowly, source)

    # ---- requests that the worker has ------------------------------------------------------------------------------

    def unique_id(self, request_id: str) -> str:
        """Return a request id that is unique in all processes, whatever id the client sent.

        The rest of its number, divided by the number of processes, is the number of this one.
        """
        return f"{request_id}#{next(self._counter)}"

    def register(
        self, request_id: str, listener: Callable[[TimedEvent], None], expire: Callable[[], None], deadline: float
    ) -> asyncio.TimerHandle:
        """Pass one request's events to `listener` until `unregister`, and call `expire` at the deadline.

        Raises `NotReady` if the worker has stopped.
        """
        assert self._loop is not None, "start() is called before the first request"
        if not self.worker.alive:
            raise NotReady("The engine has stopped; the server is about to end.")
        self._listeners[request_id] = listener
        return self._loop.call_later(deadline - self.clock(), expire)

    def note_sent(self, num_tokens: int) -> float | None:
        """Note a request that is about to be sent, and return the predicted seconds to its first token, or None."""
        is_predicted = (now := self.clock()) - self._predicted_at >= _PREDICTION_SECONDS
        if is_predicted:
            self._predicted_at = now
        return self.admission.send(num_tokens, is_predicted)

    def unregister(self, request_id: str) -> None:
        del self._listeners[request_id]

    def write_after_steps(self, write: Callable[[], None]) -> None:
        self._writes.append(write)

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Deliver events with a single wake-up of the event loop, which needs none for those that it has read itself.

        Called from the worker thread, or for an engine's process on the event loop. Steps that the event loop has not
        taken yet are delivered together.
        """
        if (loop := self._open_loop()) is None:
            return
        self._steps.append(events)
        if not self._is_woken:
            self._is_woken = True
            is_here = threading.get_ident() == self._loop_thread
            (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._deliver_steps)

    def on_worker_exit(self, error: RequestError) -> None:
        """Fail all open requests. Called after the engine's last events, from any thread."""
        if (loop := self._open_loop()) is not None:
            loop.call_soon_threadsafe(self._fail_open, error)

    def _open_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop; None if there is none, and so no open request."""
        return None if self._loop is None or self._loop.is_closed() else self._loop

    def _deliver_steps(self) -> None:
        self._is_woken = False  # before the steps are taken: those that come from now on wake the loop again
        self.is_late = len(self._steps) > 1
        for _ in range(len(self._steps)):  # not those that arrive meanwhile: a fast engine would keep the loop here
            self._deliver(self._steps.popleft())
        for write in self._writes:
            write()
        self._writes.clear()
        if self.num_direct:
            self.metrics.next_tokens(self.num_direct, Counter(self.direct_gaps))
            self.num_direct = 0
            self.direct_gaps.clear()

    def _deliver(self, events: Sequence[Event]) -> None:
        now = self.clock()
        for event in events:
            listener = self._listeners.get(event.request_id)
            if listener is not None:
                listener((event, now))

    def _fail_open(self, error: RequestError) -> None:
        self._deliver([RequestFailed(request_id, error) for request_id in self._listeners])


def _slow_prompt() -> RequestTimeout:
    return RequestTimeout("Reading the prompt took longer than the request timeout.")


def _wake(waiter: asyncio.Future[None], is_cancelled: bool) -> None:
    if not waiter.done():
        waiter.cancel() if is_cancelled else waiter.set_result(None)


def _give_way(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts. Only Linux has priorities of threads."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class TextPool:
    """Threads that read prompts beside the event loop: chat templates, tokenization, grammars.

    A request counts as waiting, in the metrics and in the predicted wait, until the thread has ended its work, even if
    the client has left. A thread asks between two chunks of a text whether the result is still needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads, self._timeout_seconds = 1, 0.0
        self._flags: dict[threading.Event, int] = {}  # flag to cancel it, and bytes, of each chunk of work
        self._seconds_per_byte = 0.0

    def open(self, num_threads: int, timeout_seconds: float = threading.TIMEOUT_MAX, niceness: int = 0) -> None:
        self._num_threads, self._timeout_seconds = num_threads, timeout_seconds
        self._pool = ThreadPoolExecutor(num_threads, "armature-text", _give_way, (niceness,))

    def close(self) -> None:
        """Cancel all work. Threads end after their current chunk."""
        with self._lock:
            for flag in self._flags:
                flag.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def num_requests(self) -> int:
        return len(self._flags)

    def wait_seconds(self) -> float:
        """Return the time after which the texts now known are read, at the speed of the last ones."""
        with self._lock:
            return sum(self._flags.values()) * self._seconds_per_byte / self._num_threads

    async def run(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in a thread. If the caller is cancelled, `stop_if_cancelled` ends the work early.

        Raises `RequestTimeout` after the timeout.
        """
        assert self._pool is not None, "open() starts the pool before the first request"
        loop, flag, context = asyncio.get_running_loop(), threading.Event(), copy_context()
        context.run(CANCELLED.set, flag)
        with self._lock:
            self._flags[flag] = num_bytes
        try:
            work = self._pool.submit(context.run, self._timed, num_bytes, function, *arguments)
        except RuntimeError:  # the pool is closed, or no thread can be started
            self._end(flag)
            raise
        waiter, late = loop.create_future(), list[bool]()

        def end(ended: Future[T]) -> None:
            self._end(flag)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_wake, waiter, ended.cancelled())

        # Cheaper than `asyncio.wrap_future` and `asyncio.timeout`.
        work.add_done_callback(end)
        timer = loop.call_later(self._timeout_seconds, lambda: late.append(waiter.cancel()))
        try:
            await waiter
            return work.result()
        except asyncio.CancelledError:
            if any(late):
                raise _slow_prompt() from None
            raise
        finally:
            timer.cancel()
            flag.set()
            work.cancel()
            del work  # it holds its error, and the error this frame: the cycle would keep the texts for long

    def _timed(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        began = time.monotonic()
        result = function(*arguments)
        if num_bytes >= _MIN_TIMED_BYTES:
            rate = (time.monotonic() - began) / num_bytes
            with self._lock:
                self._seconds_per_byte += (_GAIN if self._seconds_per_byte else 1.0) * (rate - self._seconds_per_byte)
        return result

    def _end(self, flag: threading.Event) -> None:
        with self._lock:
            self._flags.pop(flag, None)


# ---- the life of a request --------------------------------------------------------------------------------------------


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
