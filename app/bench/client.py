"""A client of the native routes that notes when each piece arrived. Works against any server of ours, wherever it runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from app.bench.stats import MeasurementFailed
from app.bench.workload import WORDS, Deck

# A long prompt on a small machine may take minutes to its first token; nothing here should give up before the server does.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=60.0, pool=None)


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed answer: when it was sent, and when each piece came with how many tokens (`time.perf_counter` seconds)."""

    started: float
    pieces: tuple[tuple[float, int], ...]

    @property
    def time_to_first_token(self) -> float:
        return self.pieces[0][0] - self.started

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Seconds from one piece to the next, for pieces that came within `(since, until]`."""
        times = [moment for moment, _ in self.pieces]
        return [later - earlier for earlier, later in pairwise(times) if since < later <= until]


OnPiece = Callable[[int], bool]  # told how many pieces have come; False leaves the server in the middle of its answer


class Client:
    """Wraps an HTTP client that knows the server's address."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ready(self) -> bool:
        """False while the server loads, or does not listen yet."""
        try:
            return (await self._http.get("/readyz")).status_code == 200
        except httpx.ConnectError:
            return False

    async def info(self) -> dict[str, Any]:
        return dict((await self._get("/info")).json())

    async def counters(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with labels as they are printed."""
        lines = (await self._get("/metrics")).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def deck(self, seed: int = 0) -> Deck:
        """Prompts out of this model's own tokens."""
        response = await self._http.post("/tokenize", json={"prompt": WORDS, "add_special_tokens": False})
        return Deck(_checked(response).json()["token_ids"], seed)

    async def generate(self, token_ids: Sequence[int], max_tokens: int, on_piece: OnPiece | None = None) -> Stream:
        """One greedy answer of exactly `max_tokens` tokens, or as far as `on_piece` wants it."""
        body = {"token_ids": list(token_ids), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        pieces: list[tuple[float, int]] = []
        started = time.perf_counter()
        async with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            async for line in _checked(response).aiter_lines():
                num_tokens = len(_event(line).get("token_ids") or ())
                if num_tokens:
                    pieces.append((time.perf_counter(), num_tokens))
                    if on_piece is not None and not on_piece(len(pieces)):
                        return Stream(started, tuple(pieces))
        stream = Stream(started, tuple(pieces))
        if stream.num_tokens != max_tokens:
            raise MeasurementFailed(f"asked for {max_tokens} tokens, the server sent {stream.num_tokens}")
        return stream

    async def _get(self, path: str) -> httpx.Response:
        return _checked(await self._http.get(path))


@asynccontextmanager
async def beside_each_other() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks of which the first failure ends all, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def connect(url: str) -> httpx.AsyncClient:
    """As many connections as a bench has streams; the environment's proxies are for other servers."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        raise MeasurementFailed(f"{response.request.url} answered {response.status_code}: {response.text[:300]}")
    return response


def _event(line: str) -> dict[str, Any]:
    """What one line of an event stream carries; nothing for blank lines and the end."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return {}
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise MeasurementFailed(f"the server ended the stream: {event['error']}")
    return event
