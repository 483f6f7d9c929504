"""A scripted server of another kind: OpenAI completions as an event stream, vectors, tensors, and typical faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
PACE_SECONDS = 0.001  # between two events, so that they arrive one by one


@dataclass
class ScriptedPeer:
    """`cut`: bytes of a part of a chunked answer. `fault`: by number, how it fails.

    `hold`: all but the first `num_asking` wait for so many. `embeds`: the dialect in which vectors are asked for.
    It runs on a thread of its own.
    """

    cut: int = 10_000
    usage: bool = True
    token_ids: bool = False  # takes them as a prompt, and has /tokenize
    tokens_per_piece: int = 1
    count: Callable[[Any], int] = len
    fault: Callable[[int], str | None] = lambda number: None
    hold: int = 0
    num_asking: int = 1
    embeds: str = "openai"
    activation_group: list[Body] | None = None  # the inputs of a model that is asked for rows
    output_indices: Callable[[int], Any] = lambda rows: {
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [rows, 1]}]
    }
    on_request: Callable[[int], None] = lambda number: None
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers False where the connection ends."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0)
        tensors = next(
            (int(line.split(":")[1]) for line in head.splitlines() if line.startswith("inference-header")), length
        )
        content = await reader.readexactly(length)
        body = json.loads(content[:tensors]) if length else {}
        if path == "/v1/models":
            return self._plain(writer, 200, {"data": [{"id": "peer"}]})
        if path == "/tokenize" and self.token_ids:
            return self._plain(writer, 200, {"tokens": list(range(50))})
        if self.activation_group is not None and path.startswith("/v2/models/peer"):
            return (
                await self._infer(writer, body) if body else self._plain(writer, 200, {"inputs": self.activation_group})
            )
        if path in ("/v1/embeddings", "/embed", "/encode", "/v2/models/peer/infer"):
            return await self._embed(writer, body)
        if path != "/v1/completions" or not (self.token_ids or isinstance(body["prompt"], str)):
            return self._plain(writer, 404, {"error": "there is no such thing"})
        return await self._complete(writer, body)

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: Any, headers: str = "") -> bool:
        text = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n{headers}\r\n".encode() + text)
        return True

    async def _taken(self, body: Body) -> str | None:
        """How this request fails, once its time has come."""
        self.bodies.append(body)
        number = len(self.bodies)
        self.on_request(number)
        fault = self.fault(number)
        self.faults[fault or "none"] += 1
        while fault != "429" and number > self.num_asking and len(self.bodies) < self.hold:
            await asyncio.sleep(0)
        return fault

    async def _embed(self, writer: asyncio.StreamWriter, body: Body) -> bool:
        fault = await self._taken(body)
        if fault == "429":
            return self._plain(writer, 429, {"error": "too many"}, "Retry-After: 0\r\n")
        if fault == "cut":
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n{")
            return False
        texts = body["input"] if self.embeds == "openai" else body["inputs"]
        texts = texts[0]["data"] if self.embeds == "oip" else texts
        usage = {"usage": {"prompt_tokens": sum(map(self.count, texts))}} if self.usage else {}
        tensor = {"name": "embedding", "shape": [len(texts), 2], "data": [0.5, 0.5] * len(texts)}
        answers: dict[str, Any] = {
            "openai": {"data": [{"index": index, "embedding": [0.5, 0.5]} for index in range(len(texts))], **usage},
            "native": {"embeddings": [[0.5, 0.5]] * len(texts), **usage},
            "tei": [[0.5, 0.5]] * len(texts),
            "oip": {"outputs": [tensor]},
        }
        return self._plain(writer, 200, answers[self.embeds])

    async def _infer(self, writer: asyncio.StreamWriter, body: Body) -> bool:
        fault = await self._taken(body)
        if fault == "429":
            return self._plain(writer, 429, {"error": "too many"}, "Retry-After: 0\r\n")
        return self._plain(writer, 200, self.output_indices(body["inputs"][0]["shape"][0]))

    async def _complete(self, writer: asyncio.StreamWriter, body: Body) -> bool:
        fault = await self._taken(body)
        if fault == "429":
            return self._plain(writer, 429, {"error": "too many"}, "Retry-After: 0\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in self._events(body, fault):
            text = event.encode()
            for part in (text[at : at + self.cut] for at in range(0, len(text), self.cut)):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
            await asyncio.sleep(PACE_SECONDS)
        if fault == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def _events(self, body: Body, fault: str | None) -> Iterator[str]:
        yield ": a comment\r\n\r\n"
        pieces = body["max_tokens"] // self.tokens_per_piece
        for index in range(pieces // 2 if fault else pieces):
            yield f"data: {json.dumps({'choices': [{'text': f'word{index} '}]})}\r\n\r\n"
        if fault == "error":
            yield 'data: {"error": {"message": "out of memory"}}\n\n'
        if fault == "garbage":
            yield "data: {not json\n\n"
        if fault:
            return
        if self.usage:
            counted = {"prompt_tokens": self.count(body["prompt"]), "completion_tokens": body["max_tokens"]}
            yield f"data: {json.dumps({'choices': [], 'usage': counted})}\n\n"
        yield "data: [DONE]\n\n"


@contextlib.contextmanager
def running(peer: ScriptedPeer) -> Iterator[ScriptedPeer]:
    """On a free port of this machine."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(peer.serve, "127.0.0.1", 0))
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield peer
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(_end(peer, server))
        loop.close()


async def _end(peer: ScriptedPeer, server: asyncio.Server) -> None:
    server.close()
    await asyncio.gather(*peer.tasks)  # whoever was connected has left
