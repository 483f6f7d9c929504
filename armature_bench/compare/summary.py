"""Console summary of one result: a line for each load, and the caveats."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from armature_bench.compare.result import CompareResult, LoadPoint
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, percentile
from armature_bench.tco.capacity import machine_options
from armature_bench.tco.prices import read_prices


def summarize_result(result: CompareResult, path: Path) -> BenchOutcome:
    """Summarize a result for the console: its main figures. All other figures are in the file."""
    figures = tuple(_figure(point) for point in result.points)
    subject = f"{result.info['model']['name']}, {result.info['plan']['precision']['value']}, on {result.name}"
    details = {"file": str(path), "doubts": result.doubts}
    notes = (
        *result.doubts,
        *_price_warnings(result),
        f"All figures are in {path}. Compare it with other results: armature bench compare {path} OTHER… --report DIR",
    )
    return BenchOutcome("compare", subject, figures, details, result.complete, notes)


def _price_warnings(result: CompareResult) -> Iterator[str]:
    """Yield warnings that the cost tables will have no price for the named instance, or will refuse the result."""
    prices = read_prices(None)
    if result.instance is not None and prices.find(result.instance) is None:
        yield f"{result.instance} is not in the price table: armature tco needs it, in a file given with --instances."
    try:
        machine_options(result, prices)
    except MeasurementFailed as error:
        yield f"armature tco will refuse this: {error}"


def _figure(point: LoadPoint) -> Figure:
    parts = {"tok/s": point.tokens_per_second} if point.tokens_per_second else {}
    for name, seconds in (
        ("ms", point.request_seconds),
        ("TTFT ms", point.first_token_seconds),
        ("TPOT ms", point.tpot_seconds),
    ):
        parts |= _median_ms(name, seconds)
    if point.request_seconds:
        parts["p99 ms"] = percentile(point.request_seconds, 0.99) * 1e3
    if point.energy is not None:
        parts["W"] = point.energy.joules / point.seconds
    return Figure(point.load.name, point.samples_per_second, "sample/s", parts=parts)


def _median_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(seconds) * 1e3} if seconds else {}
