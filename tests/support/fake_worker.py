"""A worker that does nothing by itself: a test reads what the service sent and says what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.errors import RequestError
from app.messages import (
    Abort,
    Command,
    Event,
    FinishReason,
    Generate,
    SamplingParams,
    SequenceFinished,
    Timings,
    TokensReady,
)
from app.metrics.instruments import Metrics
from app.metrics.steps import EngineSnapshot
from app.service.engine_client import EngineClient
from app.service.generate import OpenGeneration
from app.service.prompt import read_prompt
from app.service.requests import ClientRequest, GenerationRequest, StreamEvent
from app.service.served_model import ServedDecoder, ServingLimits
from app.service.service import Service
from app.text.chat import ChatTemplate
from app.text.tokenizer import Tokenizer
from small_tokenizers import FORMS, write_tokenizer

LIMITS = ServingLimits(
    max_model_len=64, max_running_seqs=2, max_waiting_requests=1, request_timeout_seconds=60, vocab_size=340
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
TIMINGS = Timings(queue_seconds=0.25, prefill_seconds=0.5, cached_tokens=1)


@cache
def tokenizer(form: str = "byte_level") -> Tokenizer:
    with TemporaryDirectory() as directory:
        return Tokenizer(write_tokenizer(Path(directory), FORMS[form]()))


@dataclass
class FakeWorker:
    """`commands` are those that were put, in order."""

    alive: bool = True
    state: str = "ready"
    stage: str = "ready"
    snapshot: EngineSnapshot = field(default_factory=EngineSnapshot)
    commands: list[Command] = field(default_factory=list)
    send_error: Callable[[Command], None] = lambda command: None
    _put: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, command: Command) -> None:
        self.commands.append(command)
        self._put.set()
        self.send_error(command)

    async def orders(self, number: int = 1) -> list[Generate]:
        """Waits until so many requests have come."""
        while len(found := [command for command in self.commands if isinstance(command, Generate)]) < number:
            self._put.clear()
            await asyncio.wait_for(self._put.wait(), 10)
        return found

    @property
    def aborts(self) -> list[Abort]:
        return [command for command in self.commands if isinstance(command, Abort)]


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@asynccontextmanager
async def serving(
    limits: ServingLimits = LIMITS, template: str | None = TEMPLATE, form: str = "byte_level"
) -> AsyncIterator[tuple[Service, FakeWorker, Clock]]:
    worker, clock = FakeWorker(), Clock()
    service = Service(worker, Metrics(clock), clock)
    await service.start()
    chat = ChatTemplate(template, tokenizer(form).named_tokens) if template is not None else None
    service.serve(ServedDecoder("demo", limits, tokenizer(form), chat))
    try:
        yield service, worker, clock
    finally:
        await service.stop()


def request(prompt: str = "the fox", **fields: Any) -> GenerationRequest:
    """A completion of a prompt; `params` may be given as a dict."""
    params = SamplingParams(**fields.pop("params", {}))
    source = {} if fields.keys() & {"token_ids", "messages"} else {"prompt": prompt}
    return GenerationRequest(**{"params": params, "api": "native", "request_id": "r", **source, **fields})


def tokens(name: str, text: str, choice: int = 0, timings: Timings | None = None) -> list[Event]:
    """A `TokensReady` for each token of a text."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    first = [timings or TIMINGS, *[None] * len(ids)]
    return [TokensReady(name, choice, (token_id,), timings=first[place]) for place, token_id in enumerate(ids)]


def finished(
    name: str, reason: FinishReason = "stop", num_tokens: int = 0, choice: int = 0, **fields: Any
) -> SequenceFinished:
    return SequenceFinished(name, choice, reason, TIMINGS, num_tokens, **fields)


def events_of(
    wanted: GenerationRequest, model: ServedDecoder, pieces: Iterable[Sequence[int]], reason: FinishReason = "stop"
) -> list[StreamEvent]:
    """The events of one choice whose tokens come in these pieces."""
    generation = OpenGeneration(_client(), wanted, ClientRequest())
    generation.begin(model, read_prompt(model, wanted))
    found: list[StreamEvent] = []
    for piece in pieces:
        found += generation.take((TokensReady("r", 0, tuple(piece)), 0.0))
    return [*found, *generation.take((finished("r", reason), 0.0))]


@cache
def _client() -> EngineClient:
    return EngineClient(FakeWorker(), Metrics(), Clock())


class Client:
    """Reads one answer in a task of its own; `pieces` grows, `error` is what ended it."""

    def __init__(self, service: Service, wanted: GenerationRequest) -> None:
        self.chunks: list[StreamEvent] = []
        self.error: RequestError | None = None
        self._grown = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(service, wanted))

    async def _read(self, service: Service, wanted: GenerationRequest) -> None:
        try:
            async with aclosing(service.generate(wanted)) as pieces:
                async for piece in pieces:
                    self.chunks.append(piece)
                    self._grown.set()
        except RequestError as error:
            self.error = error

    async def until(self, number: int) -> None:
        """Waits for so many pieces."""
        while len(self.chunks) < number:
            self._grown.clear()
            await asyncio.wait_for(self._grown.wait(), 10)

    async def over(self) -> list[StreamEvent]:
        """The whole answer; raises what ended it."""
        await asyncio.wait_for(self.task, 10)
        if self.error is not None:
            raise self.error
        return self.chunks

    @property
    def text(self) -> str:
        return "".join(getattr(piece, "text", "") for piece in self.chunks)
