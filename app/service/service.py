"""Async front end of the engine: state of the served model, readiness, and one method per kind of request.

It runs on the event loop and knows neither HTTP nor tensors nor API dialects.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from app.errors import InvalidRequest, NotReady, RequestError, ServiceStopping
from app.messages import Event
from app.metrics.gauges import engine_gauges
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot
from app.metrics.vllm_names import vllm_metrics
from app.service import encode
from app.service.adapters import Adapters, AdapterStore
from app.service.engine_client import EngineClient, OpenRequest, ProcessPlace, WorkerInterface
from app.service.generate import OpenGeneration
from app.service.pictures import ReadPicture, place_pictures
from app.service.prompt import ALL_TOKENS, chat_token_ids, check_ids, messages_size, render_chat
from app.service.requests import (
    CLIENT_REQUEST,
    ClientRequest,
    DirectOutput,
    Encoded,
    EncodingRequest,
    GenerationRequest,
    InferenceRequest,
    Inferred,
    Picture,
    StreamEvent,
    TaskRequest,
    TaskResult,
)
from app.service.served_model import (
    ServedDecoder,
    ServedEncoder,
    ServedModel,
    ServedProgram,
    ServedTasks,
    wrong_kind_error,
)
from app.text.bounds import EncodingLimits
from app.text.chat import ChatOptions
from app.text.tokenizer import Tokenizer, TokenSpan

T = TypeVar("T")
MAX_LISTED_TOKENS = 2**18  # of a text: each takes some 150 bytes while it is tokenized


class Service:
    """Async API of the engine, bound to the event loop that called `start`.

    Requests are refused as `NotReady` until `serve` was called and the worker is ready.
    """

    def __init__(
        self,
        worker: WorkerInterface,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        place: ProcessPlace | None = None,
    ) -> None:
        self._worker = worker
        self._client = client = EngineClient(worker, metrics, clock, place)
        self._model: ServedModel | None = None
        self.adapters = Adapters(AdapterStore(), worker.put)
        self._stopping = False
        wait = client.admission.predicted_wait_seconds
        metrics.gauges(lambda: engine_gauges(self.snapshot, self.ready, wait(), client.num_reading_anywhere))
        metrics.gauges(lambda: vllm_metrics(metrics, self.snapshot, client.num_reading_anywhere, self._model_name()))

    def _model_name(self) -> str:
        return "" if self._model is None else self._model.name

    # ---- life ------------------------------------------------------------------------------------------------------

    def serve(self, model: ServedModel) -> None:
        """Set the loaded model. Call it once, from any thread, before the worker reports ready."""
        self._client.open(model.limits)
        self._model = model

    def serve_adapters(self, store: AdapterStore) -> None:
        """Set the model's adapters. Call it once, from any thread, before the worker reports ready."""
        self.adapters = Adapters(store, self._worker.put)

    async def start(self) -> None:
        self._client.start()

    def drain(self) -> None:
        """Refuse new requests with `ServiceStopping`; open requests continue."""
        self._stopping = True

    async def stop(self) -> None:
        """Refuse new requests and end open ones with `ServiceStopping`. The worker is not stopped."""
        self.drain()
        self._client.close()
        if isinstance(self._model, ServedDecoder):
            self._model.close()

    # ---- callbacks of the worker, called on its thread --------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        self._client.on_events(events)

    def on_worker_exit(self, error: RequestError) -> None:
        self._client.on_worker_exit(error)

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._worker.alive

    @property
    def ready(self) -> bool:
        return self._model is not None and self._worker.state == "ready" and not self._stopping

    @property
    def stage(self) -> str:
        """Loading stage in words for people."""
        return "stopping" if self._stopping else self._worker.stage

    @property
    def load_progress(self) -> LoadProgress | None:
        """Progress of the present phase of loading; None in stages without one, and after loading."""
        return None if self._stopping else self._worker.load_progress

    @property
    def snapshot(self) -> EngineSnapshot:
        return self._worker.snapshot

    def note_reading(self) -> None:
        """Let the other processes that serve the model see how many prompts are read here."""
        self._client.note_reading()

    @property
    def num_open(self) -> int:
        """Number of open requests: being tokenized, waiting or running."""
        return self._client.admission.num_open

    @property
    def idle(self) -> bool:
        """True if the model is loaded and no request is open; the first snapshot is made after loading."""
        return self.snapshot.stepped_at > 0.0 and not self.num_open

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises `NotReady` until there is one."""
        if self._model is None:
            raise NotReady(f"The model is still loading: {self.stage}.")
        return self._model

    @property
    def decoder(self) -> ServedDecoder:
        """The model, if it generates text; otherwise raises `WrongModelKind`."""
        if isinstance(self.model, ServedDecoder):
            return self.model
        raise wrong_kind_error(self.model)

    @property
    def encoder(self) -> ServedEncoder:
        if isinstance(self.model, ServedEncoder):
            return self.model
        raise wrong_kind_error(self.model)

    @property
    def program(self) -> ServedProgram:
        if isinstance(self.model, ServedProgram):
            return self.model
        raise wrong_kind_error(self.model)

    @property
    def tasks(self) -> ServedTasks:
        if isinstance(self.model, ServedTasks):
            return self.model
        raise wrong_kind_error(self.model)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, direct: DirectOutput | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield `Accepted`, then text deltas and one `ChoiceFinished` for each choice. Raises `RequestError`.

        Tokens that were written to `direct` are not yielded. A request that times out finishes with reason `timeout`
        and the text so far, or raises `RequestTimeout` if there is no token yet. A caller that stops early must call
        `aclose()` (`contextlib.aclosing`) or cancel the awaiting task; the worker then receives an `Abort`. A slow
        reader does not slow down other requests: its backlog is bounded by its own `max_tokens`, and its place by the
        timeout.
        """
        with OpenGeneration(self._client, request, self._http(request.model), direct) as generation:
            self._check_ready()
            name, adapter = request.model, None
            if name is not None and name != self.model.name:
                adapter = generation.use_adapter(self.adapters, name)
            for event in await generation.start(self.decoder, adapter):
                yield event
            while not generation.is_over:
                for event in generation.take(await generation.next_event()):
                    yield event

    async def encode(self, request: EncodingRequest) -> Encoded:
        """Return all requested outputs of an encoder. A caller that stops early cancels the task."""
        with OpenRequest(self._client, request.api, self._http()) as opened:
            self._check_ready()
            return await encode.encode(opened, self.encoder, request)

    async def infer(self, request: InferenceRequest) -> Inferred:
        """Return the requested outputs of an exported program; the inputs were checked against its signature."""
        with OpenRequest(self._client, request.api, self._http()) as opened:
            self._check_ready()
            return await encode.infer(opened, self.program, request)

    async def run_task(self, request: TaskRequest) -> TaskResult:
        """Return the result of a task that transformers computes. A caller that stops early cancels the task."""
        with OpenRequest(self._client, request.api, self._http()) as opened:
            self._check_ready()
            return await encode.run_task(opened, self.tasks, request)

    def _http(self, adapter: str | None = None) -> ClientRequest:
        """Return the HTTP request that this context serves; its trace names the model or adapter."""
        http = CLIENT_REQUEST.get() or ClientRequest()
        if http.trace is not None and self._model is not None:
            http.trace.note_model(adapter or self._model.name)
        return http

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which may be longer than the context.

        Raises `InvalidRequest` if there are more than `MAX_LISTED_TOKENS`, and more than the context.
        """
        most = max(MAX_LISTED_TOKENS, self.model.limits.max_model_len)
        limits = EncodingLimits(self.model.limits.max_text_bytes, enough_tokens=most + 1)
        ids = await self._read(len(text), self._tokenizer.encode, text, add_special_tokens, limits)
        if len(ids) > most:
            raise InvalidRequest(f"The text has more than {most} tokens: send it in parts.")
        return ids

    async def tokenize_spans(self, text: str, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Return the tokens of a text with their places in it; without places if the text is tokenized in chunks."""
        limits = EncodingLimits(self.model.limits.max_text_bytes)
        return await self._read(len(text), self._tokenizer.encode_spans, text, add_special_tokens, limits)

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        options: ChatOptions | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Sequence[int]:
        found: list[ReadPicture] = []
        if pictures:
            with self._client.admission.permit():
                found = await self._client.look(self.decoder, pictures)
        size = messages_size(messages)
        ids = await self._read(size, chat_token_ids, self.decoder, messages, arguments, options, ALL_TOKENS, found)
        return place_pictures(ids, found).token_ids if found else ids

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        options: ChatOptions | None = None,
    ) -> str:
        return await self._read(messages_size(messages), render_chat, self.decoder, messages, arguments, options)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises `InvalidRequest` for an id outside the vocabulary."""
        check_ids(token_ids, self.model.limits.vocab_size, "token_ids")
        return await self._read(len(token_ids), self._tokenizer.decode, token_ids, skip_special_tokens)

    async def _read(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in the thread pool, with a place among the open requests."""
        with self._client.admission.permit():
            return await self._client.read(num_bytes, function, *arguments)

    @property
    def _tokenizer(self) -> Tokenizer:
        if isinstance(self.model, ServedProgram | ServedTasks):
            raise wrong_kind_error(self.model)
        return self.model.tokenizer

    def _check_ready(self) -> None:
        if self._stopping:
            raise ServiceStopping("The server is stopping.")
        if not self.ready:
            raise NotReady(f"The model is not ready: {self.stage}.")
