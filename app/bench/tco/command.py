"""`armature tco`: from result files and prices to cost tables on the console."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Asked:
    """`target` as it was typed, e.g. `10000/s`; `published` is the comparison that others published, with no files needed."""

    paths: tuple[Path, ...] = ()
    target: str | None = None
    p99_ms: float | None = None
    instances: Path | None = None
    published: bool = False
    json: bool = False


def print_costs(asked: Asked) -> int:
    """The exit status. Raises `MeasurementFailed`, with what is wrong and what would be right."""
    raise NotImplementedError
