"""Results by load: the same load of several results next to each other, and the names of loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Load, Point, Result
from app.bench.stats import percentile

Column = Callable[[Point], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one load in one result. Rates are per second, and None if there are no such units."""

    result: Result
    point: Point

    @property
    def load(self) -> Load:
        """The load that was measured."""
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
        """Samples per second, or None if there were none."""
        return self.point.samples_per_second or None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, or None if there were none."""
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
class Case:
    """One load in each result, in the order of the results; None for a result that did not measure it."""

    load: Load
    measured: tuple[Measured | None, ...]


def cases_of(results: Sequence[Result]) -> list[Case]:
    """Return every load that any result has, sorted by length, then clients, then batch size."""
    loads = sorted({point.load for result in results for point in result.points}, key=_order)
    return [Case(load, tuple(measured(result, load) for result in results)) for load in loads]


def measured(result: Result, load: Load) -> Measured | None:
    """Return the result's measurement of the load, or None."""
    return next((Measured(result, point) for point in result.points if point.load == load), None)


def measured_loads(result: Result) -> list[Measured]:
    """Return each load of one result, in the order of `load_cases`."""
    return [each for case in cases_of([result]) for each in case.measured if each is not None]


def part(info: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a nested section of a server's `/info`, or an empty mapping if it is missing."""
    for name in names:
        found = info.get(name)
        info = found if isinstance(found, dict) else {}
    return info


def load_name(load: Load) -> str:
    """Return a name such as `8 clients, prompts of 128`."""
    clients = f"{load.clients} client{'s' * (load.clients > 1)}"
    if load.kind == "generate":
        return f"{clients}, prompts of {load.tokens}"
    one, many = ("text", "texts") if load.kind == "embed" else ("row", "rows")
    size = f"{load.batch} {one if load.batch == 1 else many}" + (f" of {load.tokens}" if load.tokens else "")
    return f"{clients}, {size}"


def size_name(load: Load) -> str:
    """Return the name that all loads share that differ only in clients and batch size."""
    if load.kind == "generate":
        return f"prompts of {load.tokens} tokens, answers of {load.max_tokens}"
    return f"texts of {load.tokens} tokens" if load.kind == "embed" else "rows"


def sizes_of(cases: Iterable[Case]) -> list[tuple[str, list[Case]]]:
    """Group cases by `size_name`, in order."""
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        grouped.setdefault(size_name(case.load), []).append(case)
    return list(grouped.items())


def _order(load: Load) -> tuple[str, int, int, int, int]:
    return load.kind, load.tokens, load.max_tokens, load.clients, load.batch
