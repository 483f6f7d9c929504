"""What an API process has counted, told to the server's main process, whose registry has the counts of all.

A report has the differences since the last one, so what a process that ends has counted stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Exemplar

from app.metrics.instruments import DurationTotal, Metrics, RecentQuantiles, RecentRate

Key = tuple[str, tuple[str, ...]]  # name and label values of a series
_DURATIONS = ("succeeded", "failed", "queued")


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """Differences: of each value of a series, of the last minute's rates and latencies, and of the totals.

    A series has one value as a counter, and as a histogram its sum and its buckets; `exemplars` are by their place among
    these.
    """

    values: Mapping[Key, Mapping[int, float]] = field(default_factory=dict)
    exemplars: Mapping[Key, Mapping[int, Exemplar]] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)
    recent: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    durations: Mapping[str, DurationTotal] = field(default_factory=dict)
    num_tokens: int = 0
    num_vectors: int = 0

    @property
    def is_empty(self) -> bool:
        return all(not getattr(self, each.name) for each in fields(self))


class _CollectedRate(RecentRate):
    """Counts until it is reported: rates are read in the main process."""

    def __init__(self) -> None:
        self.amount = 0

    def record(self, amount: int = 1) -> None:
        self.amount += amount

    def per_second(self) -> float:
        return 0.0


class _CollectedQuantiles(RecentQuantiles):
    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, bucket: int, count: int) -> None:
        self.counts[bucket] = self.counts.get(bucket, 0) + count


class MetricsReporter:
    """The reports of one registry of an API process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rates = {kind: _CollectedRate() for kind in metrics.rates}
        self._recent = {name: _CollectedQuantiles() for name in metrics.recent}
        metrics.rates, metrics.recent = dict(self._rates), dict(self._recent)
        self._before: dict[Key, list[float]] = {}
        self._exemplars: dict[Key, list[Exemplar | None]] = {}
        self._num_tokens = self._num_vectors = 0

    def take(self) -> MetricsReport:
        """Return what was counted since the last report."""
        metrics = self._metrics
        values: dict[Key, dict[int, float]] = {}
        exemplars: dict[Key, dict[int, Exemplar]] = {}
        for key, cells in _series(metrics):
            now = [cell.get() for cell in cells]
            before = self._before.get(key)
            if now == before:
                continue
            self._before[key] = now
            before = before or [0.0] * len(now)
            if changed := {place: now[place] - was for place, was in enumerate(before) if now[place] != was}:
                values[key] = changed
                if found := self._new_exemplars(key, cells):
                    exemplars[key] = found
        rates = {kind: rate.amount for kind, rate in self._rates.items() if rate.amount}
        recent = {name: each.counts for name, each in self._recent.items() if each.counts}
        for kind in rates:
            self._rates[kind].amount = 0
        for name in recent:
            self._recent[name].counts = {}
        durations = {name: each for name in _DURATIONS if (each := getattr(metrics, name)).count}
        for name in durations:
            setattr(metrics, name, DurationTotal())
        tokens, vectors = metrics.num_tokens - self._num_tokens, metrics.num_vectors - self._num_vectors
        self._num_tokens, self._num_vectors = metrics.num_tokens, metrics.num_vectors
        return MetricsReport(values, exemplars, rates, recent, durations, tokens, vectors)

    def _new_exemplars(self, key: Key, cells: list[Any]) -> dict[int, Exemplar]:
        now = [cell.get_exemplar() for cell in cells]
        before = self._exemplars.get(key) or [None] * len(now)
        found = {place: each for place, each in enumerate(now) if each is not None and each is not before[place]}
        if found:
            self._exemplars[key] = now
        return found


def add_report(metrics: Metrics, report: MetricsReport) -> None:
    """Count what an API process has reported."""
    for key, changed in report.values.items():
        cells = _cells(_child(metrics.instruments[key[0]], key[1]))
        for place, amount in changed.items():
            cells[place].inc(amount)
        for place, exemplar in report.exemplars.get(key, {}).items():
            cells[place].set_exemplar(exemplar)
    for kind, amount in report.rates.items():
        metrics.rates[kind].record(amount)
    for name, counts in report.recent.items():
        for bucket, count in counts.items():
            metrics.recent[name].add(bucket, count)
    for name, more in report.durations.items():
        total: DurationTotal = getattr(metrics, name)
        total.count += more.count
        total.seconds += more.seconds
        total.ended_at = max(total.ended_at, more.ended_at)
    metrics.num_tokens += report.num_tokens
    metrics.num_vectors += report.num_vectors


def _series(metrics: Metrics) -> Iterator[tuple[Key, list[Any]]]:
    for name, instrument in list(metrics.instruments.items()):
        if instrument._labelnames:
            for labels, child in list(instrument._metrics.items()):
                yield (name, labels), _cells(child)
        else:
            yield (name, ()), _cells(instrument)


def _child(instrument: Any, labels: tuple[str, ...]) -> Any:
    return instrument.labels(*labels) if labels else instrument


def _cells(child: Counter | Histogram) -> list[Any]:
    """Return prometheus_client's values of a series: a counter's, or a histogram's sum and buckets."""
    return [child._sum, *child._buckets] if isinstance(child, Histogram) else [child._value]
