"""Requests for rows of an exported program over the Open Inference Protocol, and the timing of each answer."""

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
    """Timing of one answered request, in `time.perf_counter` seconds.

    `intended` is when the request should have been sent; latency starts there. `client` is the index of its client.
    """

    intended: float
    client: int
    started: float
    ended: float
    num_rows: int


class InferTraffic:
    """Requests to one server.

    Bodies are sent in a fixed order, so every server with the same signature receives the same requests.
    """

    def __init__(self, wire: Wire, path: str, made: Sequence[Body], num_rows: int) -> None:
        self._wire, self._path, self._made, self._num_rows = wire, path, made, num_rows
        self._num_sent = 0

    async def clients(self, run: Stretch[Inferred], num_clients: int, bounds: Bounds) -> None:
        """Run a closed loop of `num_clients` clients."""
        await loops.clients(run, num_clients, bounds, self._one)

    async def arrivals(self, run: Stretch[Inferred], moments: Iterable[float], bounds: Bounds) -> None:
        """Run an open loop with requests at these moments, in seconds from the start."""
        await loops.arrivals(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
        await asyncio.gather(*(self._post() for _ in range(num_requests)), return_exceptions=True)

    async def check(self) -> None:
        """Send one request and check its answer; the other answers are not parsed, to save processor time.

        Raises:
            MeasurementFailed: The answer does not have the expected tensors.
        """
        check_answer(await self._post(), self._path, self._num_rows)

    async def _one(self, run: Stretch[Inferred], client: int, intended: float) -> Inferred:
        started = time.perf_counter()
        await self._post()
        ended = time.perf_counter()
        run.num_pieces += self._num_rows
        return Inferred(intended, client, started, ended, self._num_rows)

    async def _post(self) -> Answer:
        """Send the next body and return the whole answer without parsing it.

        Raises:
            RequestBroken: No complete answer with status 200 arrived.
        """
        body = self._made[self._num_sent % len(self._made)]
        self._num_sent += 1
        return (await self._wire.exchange("POST", self._path, body)).checked(self._path)


async def infer_traffic(wire: Wire, model: str | None, rows: Rows) -> InferTraffic:
    """Return the traffic for `model` after one request was answered correctly.

    Raises:
        MeasurementFailed: No model is named, its inputs cannot be generated, or the answer has no tensors.
    """
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
        raise MeasurementFailed(f"{path} did not answer with a JSON object: {answer.body[:200]!r}") from error
