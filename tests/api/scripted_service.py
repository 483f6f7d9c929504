"""A service that plays a script, and clients of the application around it: by httpx, or ASGI message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import numpy

from app.api.middleware import DEPARTURE, Departure
from app.errors import NotReady
from app.messages import Timings
from app.metrics.load_progress import LoadProgress
from app.metrics.steps import EngineSnapshot, StepLog
from app.service.adapters import Adapters, AdapterStore
from app.service.requests import (
    Accepted,
    ChoiceFinished,
    DirectOutput,
    GenerationRequest,
    StreamEvent,
    TextDelta,
    Usage,
)
from app.service.served_model import ServedDecoder, ServingLimits, wrong_kind_error
from app.text.bounds import LeastTokens

Step = StreamEvent | Exception | asyncio.Event
LIMITS = ServingLimits(512, 4, 8, 60.0, 300)


class LetterTokenizer:
    """One token for each letter."""

    def __init__(self) -> None:
        self.config = {"eos_token": {"content": "<e>"}, "model_max_length": 512}
        self.named_tokens = {"eos_token": "<e>", "bos_token": "<b>"}
        self.eos_token_ids = frozenset({2, 3})

    def new_count(self) -> LeastTokens:
        return LeastTokens(numpy.ones(256), ascii_only=False)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def has_text(self, token_id: int) -> bool:
        return True


TOKENIZER: Any = LetterTokenizer()


def deltas(*texts: str, choice: int = 0, reason: Any = "stop", prompt_tokens: int = 3) -> list[Step]:
    """One choice: a delta of one token for each text, then its end."""
    pieces: list[Step] = []
    for number, text in enumerate(texts):
        timings = Timings(queue_seconds=0.001, prefill_seconds=0.002) if number == 0 else None
        pieces.append(TextDelta(choice, text, (100 + number,), timings=timings))
    usage = Usage(prompt_tokens, 1, len(texts))
    return [*pieces, ChoiceFinished(choice, reason, usage, len(texts), Timings(0.001, 0.002, 0.004))]


@dataclass
class ScriptedService:
    """Plays one script for each request, the last one again and again; an event in it is waited for, an error raised."""

    scripts: list[list[Step]] = field(default_factory=lambda: [deltas("Hello", " there")])
    ready: bool = True
    alive: bool = True
    stage: str = "ready"
    load_progress: LoadProgress | None = None
    snapshot: EngineSnapshot = field(default_factory=EngineSnapshot)
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[AsyncGenerator[StreamEvent, None]] = field(default_factory=list)
    num_open: int = 0
    num_waiting: int = 0
    adapters: Adapters = field(default_factory=lambda: Adapters(AdapterStore(), lambda command: None))

    @property
    def model(self) -> Any:
        if not self.ready:
            raise NotReady(f"The model is still loading: {self.stage}.")
        return ServedDecoder("demo", LIMITS, TOKENIZER, SimpleNamespace(source="{{ messages }}"))  # type: ignore[arg-type]

    @property
    def decoder(self) -> Any:
        return self.model

    @property
    def encoder(self) -> Any:
        raise wrong_kind_error(self.model)

    def generate(
        self, request: GenerationRequest, direct: DirectOutput | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Holds on to what it gives, so that only who closes a stream ends it, and not the collector of garbage."""
        self.streams.append(self._play(request))
        return self.streams[-1]

    async def _play(self, request: GenerationRequest) -> AsyncGenerator[StreamEvent, None]:
        self.requests.append(request)
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        self.num_open += 1
        try:
            if not self.ready:
                raise NotReady(f"The model is still loading: {self.stage}.")
            if not isinstance(script[0], Exception):
                yield Accepted((1, 2, 3))
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.num_waiting += 1
                    await step.wait()
                else:
                    yield step
        finally:
            self.num_open -= 1

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    async def tokenize_chat(
        self, messages: Sequence[Any], arguments: Any, options: Any = None, pictures: Any = ()
    ) -> list[int]:
        return [len(messages)] * (1 + len(options.tools if options else ()))

    async def render_chat(self, messages: Sequence[Any], arguments: Any, options: Any = None) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids if not (token_id == 1 and skip_special_tokens))


class CountingMetrics:
    """Remembers what was refused, how requests were answered and how many fields were ignored; renders `Accept`."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.reasons: list[str] = []
        self.responses: list[tuple[str, str, int, str]] = []
        self.ignored: list[tuple[str, int]] = []
        self.step_log = StepLog()

    def refused(self, api: str, reason: str) -> None:
        self.refusals.append(api)
        self.reasons.append(reason)

    def responded(self, *told: Any) -> None:
        self.responses.append(told)

    def fields_ignored(self, api: str, number: int) -> None:
        self.ignored.append((api, number))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        return accept.encode(), "text/plain; version=1.0.0; charset=utf-8"


@dataclass
class Lifetime:
    running: bool = False

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event, `[DONE]` as it stands."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Conversation:
    """One request, message by message: what was sent so far can be looked at, and the client can leave."""

    def __init__(
        self, app: Any, path: str, body: bytes | list[bytes], headers: dict[str, str] | None = None, reads: bool = True
    ) -> None:
        chunks = body if isinstance(body, list) else [body]
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, chunk in enumerate(chunks):
            self._incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1})
        self.sent: list[dict[str, Any]] = []
        self.received = self.received_before_answer = 0
        self._reads, self._departure = reads, Departure()
        self._told = asyncio.Condition()
        given = {"host": "armature", "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "extensions": {DEPARTURE: self._departure},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        message = await self._incoming.get()
        self.received += len(message.get("body", b""))
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.received_before_answer = self.received
        async with self._told:
            self.sent.append(message)
            self._told.notify_all()
        if not self._reads:
            await asyncio.Event().wait()

    async def until(self, count: int) -> None:
        """Waits for that many messages from the server."""
        async with asyncio.timeout(10), self._told:
            await self._told.wait_for(lambda: len(self.sent) >= count)

    def release(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})
        self._departure.leave()

    async def over(self) -> None:
        """Not `wait_for`: its cancelling would end what should have ended by itself."""
        await asyncio.wait([self.task], timeout=10)
        assert self.task.done(), "the server still works for this request"
        self.task.result()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
