"""The headline of a report: how much faster and cheaper each result is than the first, at an equal p99.

Throughput alone can always be raised by accepting more latency. Results are therefore compared at one p99 that all of
them reach, interpolated linearly between measured loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from app.bench.compare.result import Load, Result
from app.bench.report.figures import MILLI
from app.bench.report.judging import names_of
from app.bench.report.loads import Measured, cases_of, measured_loads, size_name, sizes_of
from app.bench.report.table import number

LEAST_DIFFERENCE = 0.05  # a smaller difference, or one within the variation of the repeated load, counts as equal
Reached = tuple[float, float]  # p99 in seconds, and the rate at that load


def answer(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each size of load that all results share.

    For a single result, the sentence says what it reaches.
    """
    sizes = [name for name, cases in sizes_of(cases_of(results)) if all(_curve_points(result, name) for result in results)]
    if not sizes:
        return ["These results have no load in common, so they cannot be compared."]
    return [_alone(results[0], size) if len(results) == 1 else _together(results, size) for size in sizes]


def rate_within(result: Result, size: str, p99: float) -> float | None:
    """Return the best rate, in tokens or samples per second, at which the p99 is at most `p99` seconds.

    None if even the smallest load takes longer.
    """
    rates = [rate for series in _series(result, size) for rate in _within(series, p99)]
    return max(rates, default=None)


def shared_p99(results: Sequence[Result], size: str) -> float:
    """Return the p99 in seconds at which to compare the results.

    It is the lowest p99 at which any result reaches its best rate, raised if needed to one that every result reaches.
    """
    curves = [_curve_points(result, size) for result in results]
    peaks = [max(curve, key=lambda reached: reached[1])[0] for curve in curves]
    return max(min(peaks), *(min(p99 for p99, _ in curve) for curve in curves))


def unsteadiness(result: Result) -> float:
    """Return by how much the repeated load varies: highest over lowest rate, minus 1.

    0 if it was not repeated, 1 if a rate is 0.
    """
    rates = [Measured(result, point).rate or 0.0 for point in (result.points[0], *result.repeats)]
    return max(rates) / min(rates) - 1 if min(rates) > 0 else 1.0


def _series(result: Result, size: str) -> list[list[Reached]]:
    """Return series of (p99, rate) of the loads of that size.

    In each series only the clients or only the batch size varies.
    """
    found: dict[tuple[str, int], list[tuple[int, Reached]]] = {}
    for each in measured_loads(result):
        p99, rate = each.quantile(lambda point: point.request_seconds, 0.99), each.rate
        if size_name(each.load) != size or p99 is None or rate is None:
            continue
        for axis, held in axes(each.load):
            found.setdefault((axis, held), []).append((getattr(each.load, axis), (p99, rate)))
    return [[reached for _, reached in sorted(series)] for series in found.values()]


def axes(load: Load) -> list[tuple[str, int]]:
    """Return each axis along which a load can vary, with the value of the other dimension that stays fixed."""
    return [("clients", load.batch)] + ([("batch", load.clients)] if load.kind != "generate" else [])


def _curve_points(result: Result, size: str) -> list[Reached]:
    return [reached for series in _series(result, size) for reached in series]


def _within(series: Sequence[Reached], p99: float) -> list[float]:
    rates = [rate for took, rate in series if took <= p99]
    for (took, rate), (longer, other) in pairwise(series):
        if min(took, longer) <= p99 < max(took, longer):
            rates.append(rate + (other - rate) * (p99 - took) / (longer - took))
    return rates


def _unit(result: Result, size: str) -> str:
    loads = [each for each in measured_loads(result) if size_name(each.load) == size]
    return "tokens" if any(each.tokens for each in loads) else "rows"


def _alone(result: Result, size: str) -> str:
    p99 = shared_p99([result], size)
    rate = rate_within(result, size, p99) or 0.0
    unit = _unit(result, size)
    return f"{result.name} reaches {number(rate)} {unit}/s with {size}, at a p99 of {_time(p99)}{_cost(result, rate, unit)}."


def _together(results: Sequence[Result], size: str) -> str:
    p99 = shared_p99(results, size)
    rates = [rate_within(result, size, p99) or 0.0 for result in results]
    unit, names = _unit(results[0], size), names_of(results)
    noise = max(LEAST_DIFFERENCE, *(unsteadiness(result) for result in results))
    parts = [_held(names[index], rates[index] / rates[0], noise) for index in range(1, len(results))]
    figures = ", ".join(f"{name} {number(rate)}" for name, rate in zip(names, rates, strict=True))
    head = f"With {size}, where 99 of 100 requests take at most {_time(p99)}: "
    return f"{head}{'; '.join(parts)} as {names[0]} ({unit}/s: {figures}).{_costs(results, rates, unit)}"


def _held(name: str, ratio: float, noise: float) -> str:
    if ratio > 0 and max(ratio, 1 / ratio) - 1 < noise:  # noise is a symmetric factor: a tenth of the rate is never "equal"
        return f"{name} is as fast, within the {noise:.0%} accuracy of these measurements,"
    return f"{name} does {ratio:.2f} times as much"


def _costs(results: Sequence[Result], rates: Sequence[float], unit: str) -> str:
    """Return a sentence on the cost per million units, if every result has a price."""
    prices = [result.hourly_price for result in results]
    if any(price is None for price in prices):
        return ""
    dollars = [(price or 0.0) / 3600 / rate * 1e6 for price, rate in zip(prices, rates, strict=True)]
    names = names_of(results)
    cheapest = min(range(len(results)), key=lambda index: dollars[index])
    told = ", ".join(f"{name} ${number(each)}" for name, each in zip(names, dollars, strict=True))
    return f" A million {unit} then cost: {told}; {names[cheapest]} is the cheapest."


def _cost(result: Result, rate: float, unit: str) -> str:
    if result.hourly_price is None or not rate:
        return ""
    return f"; a million {unit} then cost ${number(result.hourly_price / 3600 / rate * 1e6)}"


def _time(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * MILLI)} ms"
