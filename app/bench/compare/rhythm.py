"""The engine's steps as reported by the server, on the time axis of this measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from app.bench.client import Client
from app.bench.compare.result import Steps

MOST_STEPS = 20_000  # per point
SAME_CLOCK_SECONDS = 0.1  # a smaller difference is network latency, not another clock
_FROM_NOW_ON = 9_000_000_000_000_000


@dataclass(slots=True)
class Rhythm:
    """Reader of the server's step log.

    Each call returns the steps since the previous one. `began_at`: moment 0, in seconds since 1970 by this machine's
    clock.
    """

    client: Client
    began_at: float
    lost: int = 0  # steps that the server had overwritten, or beyond the limit of a point
    _next: int | None = None

    async def begin(self) -> None:
        """Skip all earlier steps. A server without a step log is not asked again."""
        told = await self._ask(_FROM_NOW_ON)
        self._next = None if told is None else int(told["next"])

    async def steps(self, begin: float, end: float) -> Steps:
        """Return the steps that began between two moments.

        Raises:
            RequestBroken: The server did not answer.
        """
        columns: dict[str, list[Any]] = {"at": [], "seconds": [], "phase": [], "tokens": [], "cause": []}
        moments = [begin]
        while self._next is not None and moments[-1] <= end:  # load from another client may never end
            told = await self._ask(self._next)
            if told is None or not told["steps"]["at"]:
                break
            ahead = _ahead(float(told["clock"]))
            moments = [at - ahead - self.began_at for at in told["steps"]["at"]]
            self._next = int(told["next"]) - sum(moment > end for moment in moments)
            self.lost += int(told["dropped"])
            inside = [index for index, moment in enumerate(moments) if begin <= moment <= end]
            columns["at"] += [round(max(0.0, moments[index]), 4) for index in inside]
            for name in ("seconds", "phase", "tokens", "cause"):
                columns[name] += [told["steps"][name][index] for index in inside]
        self.lost += max(0, len(columns["at"]) - MOST_STEPS)
        kept = {name: column[:MOST_STEPS] for name, column in columns.items()}
        return Steps(**kept | {"seconds": [round(float(each), 6) for each in kept["seconds"]]})

    async def _ask(self, after: int) -> dict[str, Any] | None:
        answer = await self.client.wire.get(f"/info/steps?after={after}")
        return None if answer.status == 404 else dict(answer.checked("/info/steps").json())


def _ahead(clock: float) -> float:
    """Return by how many seconds the server's clock is ahead of this machine's."""
    ahead = clock - time.time()
    return 0.0 if abs(ahead) < SAME_CLOCK_SECONDS else ahead
