"""The content of a report, before rendering: headline, notes on each result, and tables.

The headline says how much faster and cheaper each result is than the first, at an equal p99: throughput alone can
always be raised by accepting more latency. Rates are interpolated linearly between measured loads, at one p99 that all
results reach. This module needs no plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from armature_bench.compare.result import CompareResult, LoadSpec
from armature_bench.report.figures import (
    METRIC_GROUPS,
    MILLI,
    LoadCase,
    LoadResult,
    add_prices,
    group_by_size,
    info_section,
    load_cases,
    load_results,
    size_name,
)
from armature_bench.report.tables import (
    ReportOrigin,
    ReportTable,
    ResultNotes,
    collect_notes,
    decision_table,
    format_three_digits,
    head_table,
    metric_tables,
    step_tables,
    unique_names,
)


@dataclass(frozen=True, slots=True)
class ReportContent:
    """The content of a report on `results`, in the order given. The others are compared with the first."""

    results: tuple[CompareResult, ...]
    names: tuple[str, ...]
    cases: tuple[LoadCase, ...]
    notes: tuple[ResultNotes, ...]
    sentences: tuple[str, ...]
    overview: ReportTable
    metric_tables: tuple[ReportTable, ...]
    step_tables: tuple[ReportTable, ...]
    decisions: ReportTable | None
    colophon: tuple[str, ...]
    group_titles: tuple[str, ...] = tuple(topic.title for topic in METRIC_GROUPS)

    @property
    def title(self) -> str:
        """The title, such as `MODEL: MACHINE against MACHINE`."""
        model = info_section(self.results[0].info, "model").get("name", "a model")
        return f"{model}: {' against '.join(self.names)}"

    @property
    def tables(self) -> list[ReportTable]:
        return [self.overview, *self.metric_tables, *self.step_tables, *([self.decisions] if self.decisions else [])]


def build_report_content(given: Sequence[CompareResult], here: ReportOrigin) -> ReportContent:
    with_prices = add_prices(given)
    results = [each.result for each in with_prices]
    names, cases = unique_names(results), load_cases(results)
    return ReportContent(
        results=tuple(results),
        names=tuple(names),
        cases=tuple(cases),
        notes=tuple(collect_notes(results, here)),
        sentences=tuple(headline_sentences(results)),
        overview=head_table(with_prices, names),
        metric_tables=tuple(metric_tables(cases, names)),
        step_tables=tuple(step_tables(results, names)),
        decisions=decision_table(results, names),
        colophon=(
            f"Made by armature {here.version} with `armature bench compare`. Each result: requests over HTTP, a warm-up before each load, "
            "all latencies kept. p99: 99 of 100 took no longer.",
            "The figures hold for these machines, this model and that day; the costs are only as accurate as the prices that were given.",
        ),
    )


MIN_DIFFERENCE = 0.05  # a smaller difference, or one within the variation of the repeated load, counts as equal

LatencyAndRate = tuple[float, float]  # p99 in seconds, and the rate at that load


def headline_sentences(results: Sequence[CompareResult]) -> list[str]:
    """Return a sentence for each size of load that all results share; for a single result, what it reaches."""
    sizes = [
        name
        for name, cases in group_by_size(load_cases(results))
        if all(_curve_points(result, name) for result in results)
    ]
    if not sizes:
        return ["These results have no load in common, so they cannot be compared."]
    return [
        _single_sentence(results[0], size) if len(results) == 1 else _comparison_sentence(results, size)
        for size in sizes
    ]


def rate_within_p99(result: CompareResult, size: str, p99: float) -> float | None:
    """Return the best rate, in tokens or samples per second, at which the p99 is at most `p99` seconds.

    None if even the smallest load takes longer.
    """
    rates = [rate for series in _series(result, size) for rate in _rates_within(series, p99)]
    return max(rates, default=None)


def shared_p99(results: Sequence[CompareResult], size: str) -> float:
    """Return the p99 in seconds at which to compare the results.

    It is the lowest p99 at which any result reaches its best rate, raised if needed to one that every result reaches.
    """
    curves = [_curve_points(result, size) for result in results]
    peaks = [max(curve, key=lambda reached: reached[1])[0] for curve in curves]
    return max(min(peaks), *(min(p99 for p99, _ in curve) for curve in curves))


def repeat_variation(result: CompareResult) -> float:
    """Return by how much the repeated load varies: highest over lowest rate, minus 1.

    0 if it was not repeated, 1 if a rate is 0.
    """
    rates = [LoadResult(result, point).rate or 0.0 for point in (result.points[0], *result.repeats)]
    return max(rates) / min(rates) - 1 if min(rates) > 0 else 1.0


def _series(result: CompareResult, size: str) -> list[list[LatencyAndRate]]:
    """Return series of (p99, rate) of the loads of that size.

    In each series only the clients or only the batch size varies.
    """
    found: dict[tuple[str, int], list[tuple[int, LatencyAndRate]]] = {}
    for each in load_results(result):
        p99, rate = each.quantile(lambda point: point.request_seconds, 0.99), each.rate
        if size_name(each.load) != size or p99 is None or rate is None:
            continue
        for axis, held in load_axes(each.load):
            found.setdefault((axis, held), []).append((getattr(each.load, axis), (p99, rate)))
    return [[reached for _, reached in sorted(series)] for series in found.values()]


def load_axes(load: LoadSpec) -> list[tuple[str, int]]:
    """Return each axis along which a load can vary, with the value of the other dimension that stays fixed."""
    return [("clients", load.batch)] + ([("batch", load.clients)] if load.kind != "generate" else [])


def _curve_points(result: CompareResult, size: str) -> list[LatencyAndRate]:
    return [reached for series in _series(result, size) for reached in series]


def _rates_within(series: Sequence[LatencyAndRate], p99: float) -> list[float]:
    rates = [rate for took, rate in series if took <= p99]
    for (took, rate), (longer, other) in pairwise(series):
        if min(took, longer) <= p99 < max(took, longer):
            rates.append(rate + (other - rate) * (p99 - took) / (longer - took))
    return rates


def _unit(result: CompareResult, size: str) -> str:
    loads = [each for each in load_results(result) if size_name(each.load) == size]
    return "tokens" if any(each.tokens for each in loads) else "rows"


def _single_sentence(result: CompareResult, size: str) -> str:
    p99 = shared_p99([result], size)
    rate = rate_within_p99(result, size, p99) or 0.0
    unit = _unit(result, size)
    return (
        f"{result.name} reaches {format_three_digits(rate)} {unit}/s with {size}, at a p99 "
        f"of {_time(p99)}{_cost_phrase(result, rate, unit)}."
    )


def _comparison_sentence(results: Sequence[CompareResult], size: str) -> str:
    p99 = shared_p99(results, size)
    rates = [rate_within_p99(result, size, p99) or 0.0 for result in results]
    unit, names = _unit(results[0], size), unique_names(results)
    noise = max(MIN_DIFFERENCE, *(repeat_variation(result) for result in results))
    parts = [_ratio_phrase(names[index], rates[index] / rates[0], noise) for index in range(1, len(results))]
    figures = ", ".join(f"{name} {format_three_digits(rate)}" for name, rate in zip(names, rates, strict=True))
    head = f"With {size}, where 99 of 100 requests take at most {_time(p99)}: "
    return f"{head}{'; '.join(parts)} as {names[0]} ({unit}/s: {figures}).{_cost_sentence(results, rates, unit)}"


def _ratio_phrase(name: str, ratio: float, noise: float) -> str:
    if (
        ratio > 0 and max(ratio, 1 / ratio) - 1 < noise
    ):  # noise is a symmetric factor: a tenth of the rate is never "equal"
        return f"{name} is as fast, within the {noise:.0%} accuracy of these measurements,"
    return f"{name} does {ratio:.2f} times as much"


def _cost_sentence(results: Sequence[CompareResult], rates: Sequence[float], unit: str) -> str:
    """Return a sentence on the cost per million units, if every result has a price."""
    prices = [result.hourly_price for result in results]
    if any(price is None for price in prices):
        return ""
    dollars = [(price or 0.0) / 3600 / rate * 1e6 for price, rate in zip(prices, rates, strict=True)]
    names = unique_names(results)
    cheapest = min(range(len(results)), key=lambda index: dollars[index])
    listed = ", ".join(f"{name} ${format_three_digits(each)}" for name, each in zip(names, dollars, strict=True))
    return f" A million {unit} then cost: {listed}; {names[cheapest]} is the cheapest."


def _cost_phrase(result: CompareResult, rate: float, unit: str) -> str:
    if result.hourly_price is None or not rate:
        return ""
    return f"; a million {unit} then cost ${format_three_digits(result.hourly_price / 3600 / rate * 1e6)}"


def _time(seconds: float) -> str:
    return f"{format_three_digits(seconds)} s" if seconds >= 1 else f"{format_three_digits(seconds * MILLI)} ms"
