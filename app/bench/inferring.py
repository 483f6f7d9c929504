"""Exported programs under load, as measured by `armature bench http --kind infer`.

Reports rows per second and latencies of whole requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.infer_rows import Rows
from app.bench.infer_traffic import Inferred, InferTraffic, infer_traffic
from app.bench.load import Level, Target
from app.bench.loops import Bounds, Side
from app.bench.prompts import served_model
from app.bench.rates import Counted, speed
from app.bench.stats import Figure
from app.bench.tally import failures, latency
from app.bench.wire import Wire

LOAD_SECONDS = 10.0  # requests take milliseconds, so a run has thousands of them


def num_rows(answered: Inferred) -> float:
    """Return the number of rows of one request."""
    return answered.num_rows


SAMPLES = Counted("samples", "row/s", num_rows, requests=True)


@dataclass(frozen=True, slots=True)
class Inferring:
    """Inference workload: each answer arrives at once and has one row of every output per input row."""

    rows: Rows
    piece: str = "row"

    @property
    def seed(self) -> int:
        """Seed of the synthetic rows."""
        return self.rows.seed

    def bounds(self, level: Level) -> Bounds:
        """Return the default limits of one run: `LOAD_SECONDS`."""
        return Bounds(seconds=LOAD_SECONDS)

    async def traffic(self, wire: Wire, target: Target) -> tuple[InferTraffic, str]:
        """Return the traffic for one server, and a description of its rows."""
        model = target.model or await served_model(wire)
        words = f"generated from the model's signature, integers below {self.rows.below}, free dimensions of {self.rows.free}"
        return await infer_traffic(wire, model, self.rows), words

    def figures(self, side: Side[Inferred], against: Side[Inferred] | None) -> Iterator[Figure]:
        """Yield throughput, latency and failures of one server under one load."""
        if side.answered:
            yield speed(SAMPLES, side, against)
            yield latency(f"{side.label} latency", [each.ended - each.intended for each in side.answered])
        yield from failures(side)

    def doubts(self, name: str, answered: Sequence[Inferred], prompts: str) -> Iterator[str]:
        """Yield a note on the content of the rows."""
        yield f"{name}: rows are {prompts}."

    def record(self, answered: Inferred, started: float) -> dict[str, Any]:
        """Return one request for the result file; times are seconds since the run `started` or since it was due."""
        return {
            "client": answered.client,
            "intended": round(answered.intended - started, 6),
            "answered": round(answered.ended - answered.intended, 6),
            "rows": answered.num_rows,
        }

    def details(self) -> dict[str, Any]:
        """Return the workload's parameters for the result file."""
        return {"rows": self.rows.number}
