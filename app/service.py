"""The async face of the engine: admits, tokenises, hands to the worker thread and turns its events into pieces of text.

Lives on the event loop and knows no HTTP, no tensor and no dialect. The words it speaks are in `generation.py`, an answer's
bookkeeping is in `answer.py`, the count of places in `admission.py`, what a request must be in `reading.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, TypeVar

from app.admission import Admission, Permit
from app.answer import Answer
from app.errors import InvalidRequest, NotReady, RequestError, RequestTimeout, ServiceStopping, StepFailed
from app.generation import Accepted, ChoiceFinished, GenerationRequest, Piece, TextDelta
from app.measured import Snapshot
from app.messages import Abort, ArraysReady, Command, Event, Generate, RequestFailed, TokensReady
from app.metrics import Metrics, Outcome
from app.reading import ServedModel, chat_ids, check_ids, read

T = TypeVar("T")
# What a request waits for: events of the worker with the time they came; None when its time is over.
Inbox = asyncio.Queue["tuple[Event, float] | None"]


class WorkerPort(Protocol):
    """What the service sees of the worker: a mailbox and a few words about its state, readable from any thread."""

    @property
    def alive(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def snapshot(self) -> Snapshot: ...
    def put(self, command: Command) -> None: ...


class Service:
    """Bound to the event loop that called `start`. Until `serve` was called and the worker is ready, requests are refused as `NotReady`."""

    def __init__(self, worker: WorkerPort, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._metrics, self._clock = worker, metrics, clock
        self._admission = Admission(lambda: worker.snapshot, clock)
        self._model: ServedModel | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._numbers = count()
        self._open: dict[str, Inbox] = {}  # by the worker's name for the request
        metrics.read_snapshot = lambda: worker.snapshot
        metrics.predict_wait = self._admission.predicted_wait_seconds

    # ---- life ------------------------------------------------------------------------------------------------------

    def serve(self, model: ServedModel) -> None:
        """Names the loaded model; from any thread, once, before the worker says ready."""
        self._admission.max_running = model.limits.max_running_seqs
        self._admission.max_waiting = model.limits.max_waiting_requests
        self._pool = ThreadPoolExecutor(model.limits.tokenizer_threads, thread_name_prefix="armature-text")
        self._model = model

    async def start(self) -> None:
        """Binds to the running loop."""
        self._loop = asyncio.get_running_loop()

    def drain(self) -> None:
        """New requests get `ServiceStopping`; open ones go on."""
        self._stopping = True

    async def stop(self) -> None:
        """New requests get `ServiceStopping`; those still open end with it too. Does not touch the worker."""
        self.drain()
        self._fail_open(ServiceStopping("The server is stopping."))
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def alive(self) -> bool:
        return self._worker.alive

    @property
    def ready(self) -> bool:
        return self._model is not None and self._worker.state == "ready" and not self._stopping

    @property
    def stage(self) -> str:
        """Where loading is, for people: `stopping`, or the worker's own words."""
        return "stopping" if self._stopping else self._worker.stage

    @property
    def snapshot(self) -> Snapshot:
        return self._worker.snapshot

    @property
    def num_open(self) -> int:
        """Requests that have a place: tokenised just now, waiting or running."""
        return self._admission.num_open

    @property
    def model(self) -> ServedModel:
        """The loaded model; raises `NotReady` until there is one."""
        if self._model is None:
            raise NotReady(f"The model is still loading: {self.stage}.")
        return self._model

    # ---- from the worker thread ------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """The worker's callback, once a step: one wake of the loop, however many requests are told."""
        self._call(self._deliver, events)

    def on_worker_exit(self) -> None:
        """The worker's last call, after its last events: whatever is open fails."""
        self._call(self._fail_open, StepFailed("The engine has stopped; the server is about to end."))

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        if self._loop is None or self._loop.is_closed():
            return  # nobody is left to be told
        self._loop.call_soon_threadsafe(function, argument)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            inbox = self._open.get(event.request_id)
            if inbox is not None:
                inbox.put_nowait((event, now))

    def _fail_open(self, error: RequestError) -> None:
        self._deliver([RequestFailed(name, error) for name in self._open])

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """`Accepted`, then deltas and one `ChoiceFinished` for each choice. Raises a `RequestError` instead of any piece.

        A request out of time ends with reason timeout and what it has, or as `RequestTimeout` where it has nothing. Whoever leaves
        early calls `aclose()` (`contextlib.aclosing`) or cancels the task that awaits: the worker is sent an `Abort`.
        A reader that is slow holds back nobody: what piles up for it is bounded by its own `max_tokens`, and its place by the timeout.
        """
        arrived_at, accepted = self._clock(), False
        outcome: Outcome = "failed"
        try:
            model = self._ready_model()
            with self._admission.permit() as permit:
                order = await self._order(model, request, arrived_at)
                answer = Answer(order, model.tokenizer, self._metrics, continues_prompt=request.messages is None)
                deadline = arrived_at + model.limits.request_timeout_seconds
                with self._enrolled(order, answer, permit, deadline) as inbox:
                    accepted = True
                    yield Accepted(order.token_ids)
                    for echo in _echoes(request, model, order):
                        yield echo
                    while not answer.finished:
                        for piece in self._pieces(answer, order, await inbox.get()):
                            yield piece
                self._admission.observe(answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_completion_tokens)
                outcome = answer.outcome
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "aborted"
            raise
        except RequestError as error:
            outcome = _outcome(error, accepted)
            raise
        finally:
            self._count(request, outcome, arrived_at)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._run(self.model.tokenizer.encode, text, add_special_tokens)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        return await self._run(chat_ids, self.model, messages, arguments)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        model = self.model
        check_ids(token_ids, model.limits.vocab_size, "token_ids")
        return await self._run(model.tokenizer.decode, token_ids, skip_special_tokens)

    def _ready_model(self) -> ServedModel:
        if self._stopping:
            raise ServiceStopping("The server is stopping.")
        if not self.ready:
            raise NotReady(f"The model is not ready: {self.stage}.")
        return self.model

    async def _order(self, model: ServedModel, request: GenerationRequest, arrived_at: float) -> Generate:
        """The request as the worker takes it; its name is unique, whatever id a client gave."""
        try:
            async with asyncio.timeout(model.limits.request_timeout_seconds):
                token_ids = await self._run(read, model, request)
        except TimeoutError as error:
            raise RequestTimeout("Reading the prompt took longer than the request timeout.") from error
        return Generate(f"{request.request_id}#{next(self._numbers)}", token_ids, request.params, arrived_at)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """In the text pool: a long prompt holds up nobody else's tokens."""
        assert self._pool is not None, "a model that is served has brought its pool"
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    @contextmanager
    def _enrolled(self, order: Generate, answer: Answer, permit: Permit, deadline: float) -> Iterator[Inbox]:
        """The worker's answers to this order come to the inbox, and None at the deadline; however it ends, the worker forgets it."""
        assert self._loop is not None, "the service is started before it is asked"
        inbox: Inbox = asyncio.Queue()
        self._open[order.request_id] = inbox
        timer = self._loop.call_later(deadline - self._clock(), self._expire, order.request_id, permit)
        try:
            if not self._worker.alive:  # looked at after enrolling: a worker that ends later will tell the inbox
                raise NotReady("The engine has stopped; the server is about to end.")
            answer.foretell(self._admission.send(len(order.token_ids)), self._clock())
            self._worker.put(order)
            yield inbox
        finally:
            timer.cancel()
            del self._open[order.request_id]
            if not answer.finished:
                self._worker.put(Abort(order.request_id))

    def _expire(self, name: str, permit: Permit) -> None:
        """Out of time: engine and place are free at once, even if the reader never looks into its inbox again."""
        self._worker.put(Abort(name, reason="timeout"))
        permit.release()
        self._open[name].put_nowait(None)

    def _pieces(self, answer: Answer, order: Generate, item: tuple[Event, float] | None) -> Iterator[Piece]:
        if item is None:
            last = list(answer.end("timeout", self._clock()))
            if not answer.num_completion_tokens:
                raise RequestTimeout("The request timed out before its first token.")
            yield from last
            return
        event, now = item
        if isinstance(event, RequestFailed):
            raise event.error.with_traceback(None)
        assert not isinstance(event, ArraysReady), "that is an encoder's answer"
        for piece in answer.take(event, now):
            if isinstance(piece, ChoiceFinished) and isinstance(event, TokensReady):
                self._worker.put(Abort(order.request_id, reason="stop", choice=piece.choice))
            yield piece

    def _count(self, request: GenerationRequest, outcome: Outcome, arrived_at: float) -> None:
        if outcome == "refused":
            self._metrics.refused(request.api)
        else:
            self._metrics.request_ended(request.api, outcome, self._clock() - arrived_at)


def _echoes(request: GenerationRequest, model: ServedModel, order: Generate) -> Iterator[TextDelta]:
    """The prompt's text before each choice, where it was asked for."""
    if request.echo:
        text = model.tokenizer.decode(order.token_ids) if request.prompt is None else request.prompt
        yield from (TextDelta(choice, text) for choice in range(request.params.n))


def _outcome(error: RequestError, accepted: bool) -> Outcome:
    """How the metrics call a request that an error ended; the worker too may find that one can never be served."""
    if isinstance(error, RequestTimeout):
        return "timeout"
    return "failed" if accepted and not isinstance(error, InvalidRequest) else "refused"
