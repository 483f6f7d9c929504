"""What HTTP, tokenization, scheduling and sampling cost.

There are the share of wall time outside the model at a steady decode, and, with a simulated engine (`simulated.py`), the
event loop's time for a streamed token and the server's time for a short request.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed
from armature_bench.http.client import ArmatureClient, concurrent_tasks
from armature_bench.http.wire import HttpClient

NUM_STREAMS = 8
PROMPT_TOKENS = 64
WARM_UP_TOKENS = 8
MAX_TOKENS = 200
OVERHEAD_TARGET = 0.10
NUM_FAST_STREAMS = (64, 256)
TOKEN_TARGET = 15.0  # microseconds
PLACES = ("thread", "process", "two")  # of the engine; the last one serves two API processes
NUM_FIRST_TOKENS = 200
ADDED_FIRST_TOKEN_TARGET = 0.3  # milliseconds
RATE_TARGET = 0.9  # of the engine's tokens per second
ENGINE_RATE = 48_600.0  # tokens per second: what the engine makes of a 1B model on an H200 (docs/hardware.md)
PACED_RATE = 6_000.0  # tokens per second, at which the event loop is never late
NUM_CLIENTS = 8  # of short requests
REQUEST_TARGET = 600.0  # microseconds
UNPACED_RATE = 1e9
PATIENCE_SECONDS = 60.0
STOP_SECONDS = 10.0
STREAM_TOKENS = 100_000  # of a request: no stream ends within a window
_MESSAGES = [{"role": "user", "content": "Who wrote to the keeper of the lighthouse every Sunday?"}]
_ANSWER = {"messages": _MESSAGES, "max_tokens": 8}
ENCODER = "bert"  # the embedded demo
# Short requests: what is said of them, their path and their body.
GENERATE_REQUESTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("chat, 8 tokens, whole", "/v1/chat/completions", _ANSWER),
    ("chat, 8 tokens, streamed", "/v1/chat/completions", {**_ANSWER, "stream": True}),
)
ENCODE_REQUESTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("embedding of a short text", "/v1/embeddings", {"input": _MESSAGES[0]["content"]}),
)
NUM_SHORT_REQUESTS = len(GENERATE_REQUESTS) + len(ENCODE_REQUESTS)
MODEL_SECONDS = "armature_model_seconds_total"


async def overhead_outside_model(client: ArmatureClient, rounds: int, advance: AdvanceProgress) -> list[Figure]:
    """Measure one minus the model's share of wall time.

    The window starts when all streams decode and ends before the first stream does.
    """
    shares: list[float] = []
    rates: list[float] = []
    for number in range(rounds):
        share, rate = await _one_window(client, seed=number)
        shares.append(share)
        rates.append(rate)
        advance(f"window {number + 1} of {rounds}")
    return [
        Figure(f"decode ×{NUM_STREAMS} over HTTP", statistics.median(rates), "tok/s"),
        Figure(
            "outside the model",
            statistics.median(shares) * 100,
            "%",
            p99=max(shares) * 100,
            ratio=statistics.median(shares),
            against="wall time",
            target=OVERHEAD_TARGET,
            at_most=True,
            is_share=True,
        ),
    ]


async def _one_window(client: ArmatureClient, seed: int) -> tuple[float, float]:
    prompts = await client.token_prompts(seed)
    warm, ending = asyncio.Event(), asyncio.Event()
    counts = [0] * NUM_STREAMS

    def note(index: int, num_tokens: int) -> bool:
        counts[index] = num_tokens
        if min(counts) >= WARM_UP_TOKENS:
            warm.set()
        if max(counts) >= MAX_TOKENS - WARM_UP_TOKENS:
            ending.set()
        return True

    async def stream(index: int) -> None:
        await client.generate(prompts.prompt(PROMPT_TOKENS), MAX_TOKENS, lambda num_tokens: note(index, num_tokens))
        if not ending.is_set():
            raise MeasurementFailed(f"a stream of {MAX_TOKENS} tokens had {counts[index]}, too few to measure its rate")

    async with concurrent_tasks() as tasks:
        for index in range(NUM_STREAMS):
            tasks.create_task(stream(index))
        await warm.wait()
        seconds_before, tokens_before, start = await _model_seconds(client), sum(counts), time.perf_counter()
        await ending.wait()
        seconds_after, tokens_after, end = await _model_seconds(client), sum(counts), time.perf_counter()
    wall = end - start
    return 1.0 - (seconds_after - seconds_before) / wall, (tokens_after - tokens_before) / wall


async def _model_seconds(client: ArmatureClient) -> float:
    """Return the seconds spent in the model's forward pass since the server started."""
    samples = [value for name, value in (await client.counters()).items() if name.partition("{")[0] == MODEL_SECONDS]
    if not samples:
        raise MeasurementFailed(f"the server's /metrics has no {MODEL_SECONDS}")
    return sum(samples)


# ---- with a simulated engine ----------------------------------------------------------------------------------------


class _SimulatedServer:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process, self.port = process, port

    async def counts(self, rate: float) -> dict[str, float]:
        """Set the engine's tokens per second, and return the counters."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(f"{rate}\n".encode())
        return await _line(self._process)


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None, "it is a pipe"
    try:
        found: dict[str, Any] = json.loads(await process.stdout.readline())
    except ValueError:
        raise MeasurementFailed("the simulated server has ended") from None
    return found


@asynccontextmanager
async def _running(checkpoint: Path, place: str) -> AsyncIterator[_SimulatedServer]:
    # -P: do not import an `app` folder in the current directory.
    command = (sys.executable, "-P", "-m", "armature_bench.http.simulated", str(checkpoint), place)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield _SimulatedServer(process, (await _line(process))["port"])
    finally:
        try:
            await asyncio.wait_for(process.communicate(), STOP_SECONDS)  # it ends with its standard input
        except TimeoutError:
            process.kill()
            await process.communicate()


async def _read_stream(port: int, counts: list[int], place: int) -> None:
    """Ask for a completion that does not end, and count its tokens, each of which has one space."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": STREAM_TOKENS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        while read := await reader.read(65536):
            counts[place] += read.count(b" ") - read.count(b"data: ")
    finally:
        writer.close()


async def _simulated_window(
    server: _SimulatedServer, num_streams: int, rate: float, seconds: float
) -> dict[str, float]:
    """Return the differences of the server's counters, and the number of tokens that arrived, in a window."""
    counts = [0] * num_streams
    tasks = [asyncio.create_task(_read_stream(server.port, counts, place)) for place in range(num_streams)]
    try:
        await server.counts(PACED_RATE)
        patience = time.perf_counter() + PATIENCE_SECONDS
        while not all(counts):
            await asyncio.sleep(0.05)
            if time.perf_counter() > patience:
                raise MeasurementFailed(f"{num_streams} streams did not begin in {PATIENCE_SECONDS:g} s")
            if ended := [task for task in tasks if task.done()]:
                raise MeasurementFailed(f"a stream of the simulated server ended: {ended[0].exception()}")
        await server.counts(rate)
        await asyncio.sleep(0.5)
        before, arrived, began = await server.counts(rate), sum(counts), time.perf_counter()
        await asyncio.sleep(seconds)
        after, arrived, wall = await server.counts(rate), sum(counts) - arrived, time.perf_counter() - began
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"arrived": arrived, "seconds": wall, **{name: after[name] - before[name] for name in before}}


class _FirstTokens:
    """One client of a server whose engine has a token at once: a request after another, for the first token alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.seconds: list[float] = []

    async def ask(self) -> None:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        await self._reader.readuntil(b"data: ")
        self.seconds.append(time.perf_counter() - began)
        await self._reader.readuntil(b"[DONE]\n\n")
        await self._reader.readuntil(b"0\r\n\r\n")


async def _first_tokens(checkpoint: Path) -> list[Figure]:
    """Measure the time to the first token with the engine in each place, by turns: a busy moment meets all of them."""
    clients: dict[str, _FirstTokens] = {}
    async with AsyncExitStack() as servers:
        for place in PLACES:
            server = await servers.enter_async_context(_running(checkpoint, place))
            await server.counts(ENGINE_RATE)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            servers.callback(writer.close)
            clients[place] = _FirstTokens(reader, writer)
        for _ in range(NUM_FIRST_TOKENS):
            for client in clients.values():
                await client.ask()
    medians = {place: statistics.median(client.seconds) * 1e3 for place, client in clients.items()}
    added = medians["process"] - medians["thread"]
    target = ADDED_FIRST_TOKEN_TARGET
    return [
        *(Figure(f"first token ×1, {place}", milliseconds, "ms") for place, milliseconds in medians.items()),
        Figure("first token, process over thread", added, "ms", target=target, at_most=True),
    ]


async def streamed_token_cost(
    checkpoint: Path, rounds: int, advance: AdvanceProgress, seconds: float = 2.0
) -> list[Figure]:
    """Measure the event loop's CPU time for each streamed token, and the tokens that clients get of a fast engine.

    The engine is in a thread of the server, then in a process of its own, and then in one that two API processes share.
    """
    figures: list[Figure] = []
    for place in PLACES:
        async with _running(checkpoint, place) as server:
            costs: list[float] = []
            for number in range(rounds if place != PLACES[2] else 0):  # whose loops are as the one before
                window = await _simulated_window(server, NUM_FAST_STREAMS[0], PACED_RATE, seconds)
                costs.append(window["loop"] / window["tokens"] * 1e6)
                advance(f"{place}: window {number + 1} of {rounds}")
            if costs:
                name = f"event loop, a streamed token ×{NUM_FAST_STREAMS[0]}, {place}"
                figures.append(Figure(name, statistics.median(costs), "µs", target=TOKEN_TARGET, at_most=True))
            for num_streams in NUM_FAST_STREAMS:
                window = await _simulated_window(server, num_streams, ENGINE_RATE, seconds)
                advance(f"{place}: {num_streams} clients")
                rate = window["arrived"] / window["seconds"]
                figures.append(
                    Figure(
                        f"streamed to ×{num_streams} clients, {place}",
                        rate,
                        "tok/s",
                        ratio=rate / ENGINE_RATE,
                        against=f"a simulated engine of {ENGINE_RATE:,.0f} tok/s",
                        target=RATE_TARGET,
                        parts={"cores": window["process"] / window["seconds"]},
                    )
                )
    advance("first tokens")
    return [*figures, *await _first_tokens(checkpoint)]


async def _request_window(
    server: _SimulatedServer, path: str, body: Mapping[str, Any], rate: float, seconds: float
) -> dict[str, float]:
    """Return the differences of the server's counters, and the number of answers, in a window of repeated requests."""
    client, num_answers, ends = HttpClient(f"http://127.0.0.1:{server.port}"), 0, False

    async def repeat() -> None:
        nonlocal num_answers
        while not ends:
            (await client.post(path, body)).raise_for_status(path)
            num_answers += 1

    try:
        async with concurrent_tasks() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(repeat())
            await server.counts(rate)
            await asyncio.sleep(seconds / 4)
            before, answered, began = await server.counts(rate), num_answers, time.perf_counter()
            await asyncio.sleep(seconds)
            after, answered, wall = await server.counts(rate), num_answers - answered, time.perf_counter() - began
            ends = True
    finally:
        client.close()
    return {"answered": answered, "seconds": wall, **{name: after[name] - before[name] for name in before}}


async def short_request_cost(
    checkpoint: Path, rounds: int, advance: AdvanceProgress, seconds: float = 2.0
) -> list[Figure]:
    """Measure the server's CPU time for a short request at a moderate rate, and the most requests per second.

    The decoder has the template and tokenizer of `checkpoint`, and the encoder those of the embedded demo.
    """
    figures: list[Figure] = []
    for served, requests in ((checkpoint, GENERATE_REQUESTS), (Path(ENCODER), ENCODE_REQUESTS)):
        async with _running(served, PLACES[0]) as server:
            for name, path, body in requests:
                paced = [await _request_window(server, path, body, PACED_RATE, seconds / rounds) for _ in range(rounds)]
                fastest = await _request_window(server, path, body, UNPACED_RATE, seconds)
                advance(name)
                microseconds = {
                    thread: statistics.median(window[thread] / window["answered"] for window in paced) * 1e6
                    for thread in ("process", "loop")
                }
                figures.append(
                    Figure(
                        f"server, {name} ×{NUM_CLIENTS}",
                        microseconds["process"],
                        "µs",
                        target=REQUEST_TARGET,
                        at_most=True,
                        parts={
                            "event loop": microseconds["loop"],
                            "req/s": fastest["answered"] / fastest["seconds"],
                            "cores": fastest["process"] / fastest["seconds"],
                        },
                    )
                )
    return figures
