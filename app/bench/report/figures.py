"""The figures of a load that results are compared by: what each is called, its unit, how it is read, and whether more of it is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.bench.compare.result import Point
from app.bench.report.loads import Column, Measured

MILLI = 1e3


@dataclass(frozen=True, slots=True)
class Metric:
    """`read` answers None where nothing is known; `unit` is what its numbers are in; `more_is_better` None: it is told, not compared."""

    name: str
    unit: str
    read: Callable[[Measured], float | None]
    more_is_better: bool | None = False


@dataclass(frozen=True, slots=True)
class Topic:
    """Figures that stand in one table."""

    title: str
    note: str
    metrics: tuple[Metric, ...]


def _requests(point: Point) -> list[float]:
    return point.request_seconds


def _firsts(point: Point) -> list[float]:
    return point.first_token_seconds


def _gaps(point: Point) -> list[float]:
    return point.gap_seconds


def _means(point: Point) -> list[float]:
    return point.tpot_seconds


def _quantile(name: str, column: Column, share: float) -> Metric:
    def read(measured: Measured) -> float | None:
        seconds = measured.quantile(column, share)
        return None if seconds is None else seconds * MILLI

    return Metric(f"{name} p{share * 100:g}".strip(), "ms", read)


def _joules(name: str, unit: str, count: Callable[[Measured], float], above_idle: bool) -> Metric:
    def read(measured: Measured) -> float | None:
        joules, number = measured.joules(above_idle), count(measured)
        return joules / number if joules is not None and number else None

    return Metric(name, unit, read)


def _tokens(measured: Measured) -> int:
    return measured.tokens


def _samples(measured: Measured) -> float:
    """Not of generations: what one takes depends on its length alone."""
    return 0.0 if measured.load.kind == "generate" else measured.samples


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _watts(measured: Measured) -> float | None:
    joules = measured.joules(above_idle=False)
    return None if joules is None else joules / measured.point.seconds


TOPICS: tuple[Topic, ...] = (
    Topic(
        "Throughput and time of a request",
        "A sample is a whole answer: a generation, a vector, a row. Tokens are those that a decoder makes and those that an encoder reads. "
        "Percentiles are of the requests themselves: p99 of fewer than 100 is their longest.",
        (
            Metric("samples", "1/s", lambda measured: measured.samples_per_second, more_is_better=True),
            Metric("tokens", "1/s", lambda measured: measured.tokens_per_second, more_is_better=True),
            Metric("requests", "", lambda measured: len(measured.point.request_seconds), more_is_better=None),
            _quantile("", _requests, 0.50),
            _quantile("", _requests, 0.95),
            _quantile("", _requests, 0.99),
        ),
    ),
    Topic(
        "Tokens as they come",
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
    Topic(
        "Energy and cost",
        "Joules are what the meter of each result counted, named at its head; above idle: less the watts of the idle machine. "
        "Dollars are the hour's price over what was made at this load, without a pause.",
        (
            Metric("mean power", "W", _watts, more_is_better=None),
            _joules("energy", "J/token", _tokens, above_idle=False),
            _joules("above idle", "J/token", _tokens, above_idle=True),
            _joules("energy", "J/sample", _samples, above_idle=False),
            _joules("above idle", "J/sample", _samples, above_idle=True),
            Metric("cost", "$/M tokens", lambda measured: measured.dollars_per_million(measured.tokens)),
            Metric("cost", "$/M samples", lambda measured: measured.dollars_per_million(_samples(measured))),
        ),
    ),
    Topic(
        "Circumstances",
        "What went on beside each load. Taken by others: of all cores, by the host or by anybody but the server and this client. "
        "Pressure: of the time, somebody waited for a core. The client's own: of one core; above a half it may have been what was slow.",
        (
            Metric("throttled", "s", lambda measured: measured.point.throttled_seconds, more_is_better=None),
            Metric("taken by others", "%", lambda measured: _percent(measured.point.stolen_ratio), more_is_better=None),
            Metric("pressure", "%", lambda measured: _percent(measured.point.pressure_ratio), more_is_better=None),
            Metric("the client's own", "%", lambda measured: _percent(measured.point.client_cpu_ratio), more_is_better=None),
        ),
    ),
)
