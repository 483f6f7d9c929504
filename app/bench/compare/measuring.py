"""`armature bench compare`: one machine measured with one model, from the server's start to the result file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.bench.load import Target
from app.bench.stats import MeasurementFailed, Outcome

POINT_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Place:
    """What the operator says of this machine: its name in reports, its row of the price table, dollars an hour, watts."""

    name: str | None = None
    instance: str | None = None
    hourly_price: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class MachineJob:
    """`seconds`: for which each point sends requests. `output` None: a name is made of what was measured."""

    target: Target
    place: Place
    output: Path | None
    seconds: float = POINT_SECONDS
    seed: int = 0


def measure_machine(job: MachineJob) -> Outcome:
    raise MeasurementFailed("nothing is measured yet")
