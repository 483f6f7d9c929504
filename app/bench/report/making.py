"""Makes the report of several result files: tables on the console, and a page with its plots where a folder is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.compare.result import Result, read_result
from app.bench.stats import MeasurementFailed


@dataclass(frozen=True, slots=True)
class Here:
    """Where the report is made: the version of this program, and this machine's facts as `/info` would give them."""

    version: str
    facts: Mapping[str, Any]


def make_report(paths: Sequence[Path], folder: Path | None, force: bool, here: Here) -> int:
    """Exit status. Raises `MeasurementFailed` for what cannot be read or must not be compared."""
    results = [read_result(path) for path in paths]
    check_comparable(results, force)
    return 0


def check_comparable(results: Sequence[Result], force: bool) -> None:
    """Results of different models are refused unless `force`."""
    shapes = [result.model_shape for result in results]
    if not force and any(shape != shapes[0] for shape in shapes):
        raise MeasurementFailed("these are results of different models; --force compares them all the same")
