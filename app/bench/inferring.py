"""Rows of any model under load, as `bench http --kind infer` measures it: rows a second, and latencies of whole requests."""

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

LOAD_SECONDS = 10.0  # requests take milliseconds: so many seconds hold thousands


def num_rows(answered: Inferred) -> float:
    return answered.num_rows


SAMPLES = Counted("samples", "row/s", num_rows, requests=True)


@dataclass(frozen=True, slots=True)
class Inferring:
    """Whole answers, each with a row of every output for each row that was asked."""

    rows: Rows
    piece: str = "row"

    @property
    def seed(self) -> int:
        return self.rows.seed

    def bounds(self, level: Level) -> Bounds:
        return Bounds(seconds=LOAD_SECONDS)

    async def traffic(self, wire: Wire, target: Target) -> tuple[InferTraffic, str]:
        model = target.model or await served_model(wire)
        words = f"made up by the model's signature, whole numbers below {self.rows.below}, free dimensions of {self.rows.free}"
        return await infer_traffic(wire, model, self.rows), words

    def figures(self, side: Side[Inferred], against: Side[Inferred] | None) -> Iterator[Figure]:
        if side.answered:
            yield speed(SAMPLES, side, against)
            yield latency(f"{side.label} latency", [each.ended - each.intended for each in side.answered])
        yield from failures(side)

    def doubts(self, name: str, answered: Sequence[Inferred], prompts: str) -> Iterator[str]:
        yield f"{name}: rows are {prompts}."

    def record(self, answered: Inferred, started: float) -> dict[str, Any]:
        return {
            "client": answered.client,
            "intended": round(answered.intended - started, 6),
            "answered": round(answered.ended - answered.intended, 6),
            "rows": answered.num_rows,
        }

    def details(self) -> dict[str, Any]:
        return {"rows": self.rows.number}
