"""The async face of the engine: what is served, whether it can be asked, and every question that it answers.

Lives on the event loop and knows no HTTP, no tensor and no dialect. The words it speaks are in `generation.py` and `encoding.py`; how a
request is answered in `generating.py` and `computing.py`, what all of them pass in `desk.py`, the way to the worker in `post.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from app import computing, generating
from app.desk import Desk
from app.encoding import Encoded, EncodingRequest, InferenceRequest, Inferred
from app.errors import NotReady, ServiceStopping
from app.generation import GenerationRequest, Piece
from app.measured import Snapshot
from app.metrics import Metrics
from app.post import WorkerPort
from app.reading import chat_ids, check_ids
from app.served import ServedDecoder, ServedEncoder, ServedModel, ServedProgram, wrong_kind
from app.text.tokenizer import Tokenizer


class Service:
    """Bound to the event loop that called `start`. Until `serve` was called and the worker is ready, requests are refused as `NotReady`."""

    def __init__(self, worker: WorkerPort, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._metrics = worker, metrics
        self._desk = Desk(worker, metrics, clock)
        self._model: ServedModel | None = None
        self._stopping = False
        self.on_events, self.on_worker_exit = self._desk.post.on_events, self._desk.post.on_worker_exit  # the worker's callbacks
        metrics.read_snapshot = lambda: worker.snapshot
        metrics.predict_wait = self._desk.admission.predicted_wait_seconds
        metrics.num_open = lambda: self.num_open
        metrics.is_ready = lambda: self.ready

    # ---- life ------------------------------------------------------------------------------------------------------

    def serve(self, model: ServedModel) -> None:
        """Names the loaded model; from any thread, once, before the worker says ready."""
        self._desk.open(model.limits)
        self._model = model

    async def start(self) -> None:
        """Binds to the running loop."""
        self._desk.post.start()

    def drain(self) -> None:
        """New requests get `ServiceStopping`; open ones go on."""
        self._stopping = True

    async def stop(self) -> None:
        """New requests get `ServiceStopping`; those still open end with it too. Does not touch the worker."""
        self.drain()
        self._desk.close()

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
        return self._desk.admission.num_open

    @property
    def model(self) -> ServedModel:
        """The loaded model; raises `NotReady` until there is one."""
        if self._model is None:
            raise NotReady(f"The model is still loading: {self.stage}.")
        return self._model

    @property
    def decoder(self) -> ServedDecoder:
        """The model, if it generates text; else raises `WrongModelKind`. So do the next two."""
        if isinstance(self.model, ServedDecoder):
            return self.model
        raise wrong_kind(self.model)

    @property
    def encoder(self) -> ServedEncoder:
        if isinstance(self.model, ServedEncoder):
            return self.model
        raise wrong_kind(self.model)

    @property
    def program(self) -> ServedProgram:
        if isinstance(self.model, ServedProgram):
            return self.model
        raise wrong_kind(self.model)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """`Accepted`, then deltas and one `ChoiceFinished` for each choice. Raises a `RequestError` instead of any piece.

        A request out of time ends with reason timeout and what it has, or as `RequestTimeout` where it has nothing. Whoever leaves
        early calls `aclose()` (`contextlib.aclosing`) or cancels the task that awaits: the worker is sent an `Abort`.
        A reader that is slow holds back nobody: what piles up for it is bounded by its own `max_tokens`, and its place by the timeout.
        """
        with self._desk.counted(request.api) as course:
            self._check_ready()
            async with aclosing(generating.generate(self._desk, self.decoder, request, course)) as pieces:
                async for piece in pieces:
                    yield piece

    async def encode(self, request: EncodingRequest) -> Encoded:
        """All that was asked for at once. Raises a `RequestError`; whoever leaves early cancels the task that awaits."""
        with self._desk.counted(request.api) as course:
            self._check_ready()
            return await computing.encode(self._desk, self.encoder, request, course)

    async def infer(self, request: InferenceRequest) -> Inferred:
        """As `encode`, for an exported program; the inputs have been held against its signature."""
        with self._desk.counted(request.api) as course:
            self._check_ready()
            return await computing.infer(self._desk, self.program, request, course)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._desk.run(self._tokenizer.encode, text, add_special_tokens)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        return await self._desk.run(chat_ids, self.decoder, messages, arguments)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        check_ids(token_ids, self.model.limits.vocab_size, "token_ids")
        return await self._desk.run(self._tokenizer.decode, token_ids, skip_special_tokens)

    @property
    def _tokenizer(self) -> Tokenizer:
        if isinstance(self.model, ServedProgram):
            raise wrong_kind(self.model)
        return self.model.tokenizer

    def _check_ready(self) -> None:
        if self._stopping:
            raise ServiceStopping("The server is stopping.")
        if not self.ready:
            raise NotReady(f"The model is not ready: {self.stage}.")
