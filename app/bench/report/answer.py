"""The answer in a sentence: how much quicker and how much cheaper results are than the first, where their slowest requests take as long.

Throughput alone can always be bought with waiting. So results are held against each other at one p99 that all of them reach, between
measured loads by a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from app.bench.compare.result import Load, Result
from app.bench.report.figures import MILLI
from app.bench.report.judging import names_of
from app.bench.report.loads import Measured, cases_of, measured_loads, size_name, sizes_of
from app.bench.report.table import number

LEAST_DIFFERENCE = 0.05  # below that, or below what the reference load differed by from itself, nothing is claimed
Reached = tuple[float, float]  # p99 in seconds, and the rate that came with it


def answer(results: Sequence[Result]) -> list[str]:
    """A sentence for each size of load that all results share. Of one result: what it reaches."""
    sizes = [name for name, cases in sizes_of(cases_of(results)) if all(_curve_points(result, name) for result in results)]
    if not sizes:
        return ["These results have no load in common: nothing can be said of one against the other."]
    return [_alone(results[0], size) if len(results) == 1 else _together(results, size) for size in sizes]


def rate_within(result: Result, size: str, p99: float) -> float | None:
    """The best rate, in tokens or samples a second, whose p99 is no longer; None where even the smallest load takes longer."""
    rates = [rate for series in _series(result, size) for rate in _within(series, p99)]
    return max(rates, default=None)


def shared_p99(results: Sequence[Result], size: str) -> float:
    """Seconds: what the quickest to reach its best rate takes there, but no less than what each can reach at all."""
    curves = [_curve_points(result, size) for result in results]
    peaks = [max(curve, key=lambda reached: reached[1])[0] for curve in curves]
    return max(min(peaks), *(min(p99 for p99, _ in curve) for curve in curves))


def unsteadiness(result: Result) -> float:
    """By how much the load that was measured several times differs from itself, as a part of the least; 0 where none was."""
    rates = [Measured(result, point).rate or 0.0 for point in (result.points[0], *result.repeats)]
    return max(rates) / min(rates) - 1 if min(rates) > 0 else 1.0


def _series(result: Result, size: str) -> list[list[Reached]]:
    """Loads of that size in which only the clients differ, or only the batch, each in order."""
    found: dict[tuple[str, int], list[tuple[int, Reached]]] = {}
    for each in measured_loads(result):
        p99, rate = each.quantile(lambda point: point.request_seconds, 0.99), each.rate
        if size_name(each.load) != size or p99 is None or rate is None:
            continue
        for axis, held in axes(each.load):
            found.setdefault((axis, held), []).append((getattr(each.load, axis), (p99, rate)))
    return [[reached for _, reached in sorted(series)] for series in found.values()]


def axes(load: Load) -> list[tuple[str, int]]:
    """Along what a load may lie, and what is held the while."""
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
    if ratio > 0 and max(ratio, 1 / ratio) - 1 < noise:  # noise is a factor, up as down: a tenth is never "as quick"
        return f"{name} is as quick, within the {noise:.0%} that these measurements can tell,"
    return f"{name} does {ratio:.2f} times as much"


def _costs(results: Sequence[Result], rates: Sequence[float], unit: str) -> str:
    """Cheaper by how much, where each has a price."""
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
