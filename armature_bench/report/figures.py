"""The compared values: the same load of several results, its metrics, and the price of each machine.

The hourly price is given by the operator, or found in the price table by instance name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec
from armature_bench.console import percentile
from armature_bench.tco.prices import PriceTable, read_prices

Column = Callable[[LoadPoint], Sequence[float]]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The measurement of one load in one result. Rates are per second, and None if there are no such units."""

    result: CompareResult
    point: LoadPoint

    @property
    def load(self) -> LoadSpec:
        return self.point.load

    @property
    def samples(self) -> float:
        """Number of whole answers: generations, vectors or rows."""
        return self.point.samples

    @property
    def tokens(self) -> int:
        """Number of tokens that a decoder generated or an encoder read; 0 for rows."""
        return self.point.generated_tokens or self.point.read_tokens

    @property
    def samples_per_second(self) -> float | None:
        return self.point.samples_per_second or None

    @property
    def tokens_per_second(self) -> float | None:
        return self.point.tokens_per_second or None

    @property
    def rate(self) -> float | None:
        """Tokens per second, or samples per second if there are no tokens."""
        return self.tokens_per_second or self.samples_per_second

    def quantile(self, read: Column, share: float) -> float | None:
        """Return a quantile of a column in seconds, or None if nothing was measured."""
        values = read(self.point)
        return percentile(values, share) if values else None

    def joules(self, above_idle: bool) -> float | None:
        """Return the energy of the load, without idle energy if `above_idle` (at least 0); None if unknown."""
        energy = self.point.energy
        if energy is None or not above_idle:
            return None if energy is None else energy.joules
        return None if energy.idle_watts is None else max(0.0, energy.joules - energy.idle_watts * self.point.seconds)

    def dollars_per_million(self, units: float) -> float | None:
        """Return the cost of a million units at the rate of `units` in this load's time; None without a price."""
        price = self.result.hourly_price
        return price / 3600 * self.point.seconds / units * 1e6 if price is not None and units else None


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load in each result, in the order of the results; None for a result that did not measure it."""

    load: LoadSpec
    measured: tuple[LoadResult | None, ...]


def load_cases(results: Sequence[CompareResult]) -> list[LoadCase]:
    """Return every load that any result has, sorted by length, then clients, then batch size."""
    loads = sorted({point.load for result in results for point in result.points}, key=_order)
    return [LoadCase(load, tuple(find_load_result(result, load) for result in results)) for load in loads]


def find_load_result(result: CompareResult, load: LoadSpec) -> LoadResult | None:
    return next((LoadResult(result, point) for point in result.points if point.load == load), None)


def load_results(result: CompareResult) -> list[LoadResult]:
    """Return each load of one result, in the order of `load_cases`."""
    return [each for case in load_cases([result]) for each in case.measured if each is not None]


def info_section(info: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a nested section of a server's `/info`, or an empty mapping if it is missing."""
    for name in names:
        found = info.get(name)
        info = found if isinstance(found, dict) else {}
    return info


def load_name(load: LoadSpec) -> str:
    """Return a name such as `8 clients, prompts of 128`."""
    clients = f"{load.clients} client{'s' * (load.clients > 1)}"
    if load.kind == "generate":
        return f"{clients}, prompts of {load.tokens}"
    one, many = ("text", "texts") if load.kind == "embed" else ("row", "rows")
    size = f"{load.batch} {one if load.batch == 1 else many}" + (f" of {load.tokens}" if load.tokens else "")
    return f"{clients}, {size}"


def size_name(load: LoadSpec) -> str:
    """Return the name that all loads share that differ only in clients and batch size."""
    if load.kind == "generate":
        return f"prompts of {load.tokens} tokens, answers of {load.max_tokens}"
    return f"texts of {load.tokens} tokens" if load.kind == "embed" else "rows"


def group_by_size(cases: Iterable[LoadCase]) -> list[tuple[str, list[LoadCase]]]:
    grouped: dict[str, list[LoadCase]] = {}
    for case in cases:
        grouped.setdefault(size_name(case.load), []).append(case)
    return list(grouped.items())


def _order(load: LoadSpec) -> tuple[str, int, int, int, int]:
    return load.kind, load.tokens, load.max_tokens, load.clients, load.batch


MILLI = 1e3


@dataclass(frozen=True, slots=True)
class ReportMetric:
    """One column of a report table.

    `read` returns None if the value is unknown, else a number in `unit`. With `more_is_better` None, the value is shown
    but not compared.
    """

    name: str
    unit: str
    read: Callable[[LoadResult], float | None]
    more_is_better: bool | None = False


@dataclass(frozen=True, slots=True)
class MetricGroup:
    title: str
    note: str
    metrics: tuple[ReportMetric, ...]


def _requests(point: LoadPoint) -> list[float]:
    return point.request_seconds


def _firsts(point: LoadPoint) -> list[float]:
    return point.first_token_seconds


def _gaps(point: LoadPoint) -> list[float]:
    return point.gap_seconds


def _means(point: LoadPoint) -> list[float]:
    return point.tpot_seconds


def _quantile(name: str, column: Column, share: float) -> ReportMetric:
    def read(measured: LoadResult) -> float | None:
        seconds = measured.quantile(column, share)
        return None if seconds is None else seconds * MILLI

    return ReportMetric(f"{name} p{share * 100:g}".strip(), "ms", read)


def _joules(name: str, unit: str, count: Callable[[LoadResult], float], above_idle: bool) -> ReportMetric:
    def read(measured: LoadResult) -> float | None:
        joules, number = measured.joules(above_idle), count(measured)
        return joules / number if joules is not None and number else None

    return ReportMetric(name, unit, read)


def _tokens(measured: LoadResult) -> int:
    return measured.tokens


def _samples(measured: LoadResult) -> float:
    """Return the number of samples, or 0 for generations: the cost of one depends on its length alone."""
    return 0.0 if measured.load.kind == "generate" else measured.samples


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _watts(measured: LoadResult) -> float | None:
    joules = measured.joules(above_idle=False)
    return None if joules is None else joules / measured.point.seconds


METRIC_GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup(
        "Throughput and request latency",
        "A sample is a whole answer: a generation, a vector, a row. Tokens are generated by a decoder, or read by an encoder. "
        "Percentiles are taken over requests: with fewer than 100, the p99 is the slowest.",
        (
            ReportMetric("samples", "1/s", lambda measured: measured.samples_per_second, more_is_better=True),
            ReportMetric("tokens", "1/s", lambda measured: measured.tokens_per_second, more_is_better=True),
            ReportMetric("requests", "", lambda measured: len(measured.point.request_seconds), more_is_better=None),
            _quantile("", _requests, 0.50),
            _quantile("", _requests, 0.95),
            _quantile("", _requests, 0.99),
        ),
    ),
    MetricGroup(
        "Token latency",
        "TTFT: time to the first token. ITL: time from one token to the next. TPOT: mean time of an answer's tokens after its first.",
        (
            _quantile("TTFT", _firsts, 0.50),
            _quantile("TTFT", _firsts, 0.99),
            _quantile("ITL", _gaps, 0.50),
            _quantile("ITL", _gaps, 0.99),
            _quantile("TPOT", _means, 0.50),
            _quantile("TPOT", _means, 0.99),
        ),
    ),
    MetricGroup(
        "Energy and cost",
        "Joules were counted by the meter named at the top for each result. Above idle: without the power of the idle machine. "
        "Dollars are the hourly price divided by the output at this load, without idle time.",
        (
            ReportMetric("mean power", "W", _watts, more_is_better=None),
            _joules("energy", "J/token", _tokens, above_idle=False),
            _joules("above idle", "J/token", _tokens, above_idle=True),
            _joules("energy", "J/sample", _samples, above_idle=False),
            _joules("above idle", "J/sample", _samples, above_idle=True),
            ReportMetric("cost", "$/M tokens", lambda measured: measured.dollars_per_million(measured.tokens)),
            ReportMetric("cost", "$/M samples", lambda measured: measured.dollars_per_million(_samples(measured))),
        ),
    ),
    MetricGroup(
        "Circumstances",
        "Conditions during each load. Taken by others: share of all cores used by other processes or stolen by the host. "
        "Pressure: share of time in which a thread waited for a core. The client's own: share of one core; above 50% it may be the limit.",
        (
            ReportMetric("throttled", "s", lambda measured: measured.point.throttled_seconds, more_is_better=None),
            ReportMetric(
                "taken by others", "%", lambda measured: _percent(measured.point.stolen_ratio), more_is_better=None
            ),
            ReportMetric(
                "pressure", "%", lambda measured: _percent(measured.point.pressure_ratio), more_is_better=None
            ),
            ReportMetric(
                "the client's own", "%", lambda measured: _percent(measured.point.client_cpu_ratio), more_is_better=None
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class PricedResult:
    """A result with its price. `origin`: the source of the price; empty without one."""

    result: CompareResult
    origin: str


def add_prices(results: Sequence[CompareResult]) -> list[PricedResult]:
    """Return the results with prices from the shipped price table filled in."""
    prices = read_prices(None)
    return [_priced(result, prices) for result in results]


def _priced(result: CompareResult, prices: PriceTable) -> PricedResult:
    if result.hourly_price is not None:
        return PricedResult(result, "the operator's setting")
    found = prices.find(result.instance) if result.instance else None
    if found is None or found[1].dollars_an_hour is None:
        return PricedResult(result, "")
    family, size = found
    origin = f"{family.region}, {family.as_of or family.read}, {family.source}"
    return PricedResult(result.model_copy(update={"hourly_price": size.dollars_an_hour}), origin)
