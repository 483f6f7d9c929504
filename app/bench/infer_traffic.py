"""Requests for the rows of a model that knows no text, to one server over the Open Inference Protocol, and when each was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from app.bench import loops
from app.bench.infer_rows import Rows, bodies, check_answer, inputs_of
from app.bench.loops import Bounds, Stretch
from app.bench.stats import MeasurementFailed
from app.bench.wire import Answer, Body, Wire


@dataclass(frozen=True, slots=True)
class Inferred:
    """One answered request. `intended`: when it should have been sent, which is when latency begins; `client`: whose it was."""

    intended: float
    client: int
    started: float
    ended: float
    num_rows: int


class InferTraffic:
    """To one server. Bodies are sent in turn: the same for every server that tells the same signature."""

    def __init__(self, wire: Wire, path: str, made: Sequence[Body], num_rows: int) -> None:
        self._wire, self._path, self._made, self._num_rows = wire, path, made, num_rows
        self._num_sent = 0

    async def clients(self, run: Stretch[Inferred], num_clients: int, bounds: Bounds) -> None:
        await loops.clients(run, num_clients, bounds, self._one)

    async def arrivals(self, run: Stretch[Inferred], moments: Iterable[float], bounds: Bounds) -> None:
        await loops.arrivals(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Requests that are not counted, beside each other; what fails will fail again."""
        await asyncio.gather(*(self._post() for _ in range(num_requests)), return_exceptions=True)

    async def check(self) -> None:
        """Reads one answer; the others are not looked at, which would take the server's cores. Raises `MeasurementFailed`."""
        check_answer(await self._post(), self._path, self._num_rows)

    async def _one(self, run: Stretch[Inferred], client: int, intended: float) -> Inferred:
        started = time.perf_counter()
        await self._post()
        ended = time.perf_counter()
        run.num_pieces += self._num_rows
        return Inferred(intended, client, started, ended, self._num_rows)

    async def _post(self) -> Answer:
        """A whole answer, not looked at. Raises `RequestBroken`."""
        body = self._made[self._num_sent % len(self._made)]
        self._num_sent += 1
        return (await self._wire.exchange("POST", self._path, body)).checked(self._path)


async def infer_traffic(wire: Wire, model: str | None, rows: Rows) -> InferTraffic:
    """For the model of that name; it has answered once. Raises `MeasurementFailed` where rows cannot be made up, or no tensors come."""
    if model is None:
        raise MeasurementFailed(f"{wire.url} lists no models: name one with --model")
    about = f"/v2/models/{quote(model, safe='')}"
    metadata = _object((await wire.get(about)).checked(about), about)
    traffic = InferTraffic(wire, f"{about}/infer", bodies(inputs_of(metadata, about), rows), rows.number)
    await traffic.check()
    return traffic


def _object(answer: Answer, path: str) -> dict[str, Any]:
    try:
        return dict(answer.json())
    except (ValueError, TypeError) as error:
        raise MeasurementFailed(f"{path} answered no JSON object: {answer.body[:200]!r}") from error
