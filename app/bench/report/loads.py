"""What was measured, by load: the same load of several results side by side, and what loads are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Load, Point, Result
from app.bench.stats import percentile

Column = Callable[[Point], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one result has of one load. Rates are in units a second, None where there was nothing of the kind."""

    result: Result
    point: Point

    @property
    def load(self) -> Load:
        return self.point.load

    @property
    def samples(self) -> float:
        """Whole answers: generations, vectors, rows."""
        return self.point.samples

    @property
    def tokens(self) -> int:
        """What a decoder made, what an encoder read; 0 where rows have none."""
        return self.point.generated_tokens or self.point.read_tokens

    @property
    def samples_per_second(self) -> float | None:
        return self.point.samples_per_second or None

    @property
    def tokens_per_second(self) -> float | None:
        return self.point.tokens_per_second or None

    @property
    def rate(self) -> float | None:
        """Tokens a second, or samples where there are no tokens."""
        return self.tokens_per_second or self.samples_per_second

    def quantile(self, read: Column, share: float) -> float | None:
        """None where nothing was measured. In seconds."""
        values = read(self.point)
        return percentile(values, share) if values else None

    def joules(self, above_idle: bool) -> float | None:
        """None where they are not known. What was idle is taken away where asked, never below nothing."""
        energy = self.point.energy
        if energy is None or not above_idle:
            return None if energy is None else energy.joules
        return None if energy.idle_watts is None else max(0.0, energy.joules - energy.idle_watts * self.point.seconds)

    def dollars_per_million(self, units: float) -> float | None:
        """What a million of them cost, where `units` were made in this time; None without a price."""
        price = self.result.hourly_price
        return price / 3600 * self.point.seconds / units * 1e6 if price is not None and units else None


@dataclass(frozen=True, slots=True)
class Case:
    """One load as each result has it, in their order; None where a result does not."""

    load: Load
    measured: tuple[Measured | None, ...]


def cases_of(results: Sequence[Result]) -> list[Case]:
    """Every load that any result has: shorter ones first, then fewer clients, then smaller batches."""
    loads = sorted({point.load for result in results for point in result.points}, key=_order)
    return [Case(load, tuple(measured(result, load) for result in results)) for load in loads]


def measured(result: Result, load: Load) -> Measured | None:
    return next((Measured(result, point) for point in result.points if point.load == load), None)


def measured_loads(result: Result) -> list[Measured]:
    """Each load of one result, in the order of `cases_of`."""
    return [each for case in cases_of([result]) for each in case.measured if each is not None]


def part(info: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """What stands there of what a server said of itself; nothing where an older or another one says nothing of it."""
    for name in names:
        found = info.get(name)
        info = found if isinstance(found, dict) else {}
    return info


def load_name(load: Load) -> str:
    """`8 clients, prompts of 128 tokens`."""
    clients = f"{load.clients} client{'s' * (load.clients > 1)}"
    if load.kind == "generate":
        return f"{clients}, prompts of {load.tokens}"
    one, many = ("text", "texts") if load.kind == "embed" else ("row", "rows")
    size = f"{load.batch} {one if load.batch == 1 else many}" + (f" of {load.tokens}" if load.tokens else "")
    return f"{clients}, {size}"


def size_name(load: Load) -> str:
    """What loads that differ only in clients and batch have in common."""
    if load.kind == "generate":
        return f"prompts of {load.tokens} tokens, answers of {load.max_tokens}"
    return f"texts of {load.tokens} tokens" if load.kind == "embed" else "rows"


def sizes_of(cases: Iterable[Case]) -> list[tuple[str, list[Case]]]:
    """Loads by `size_name`, in their order."""
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        grouped.setdefault(size_name(case.load), []).append(case)
    return list(grouped.items())


def _order(load: Load) -> tuple[str, int, int, int, int]:
    return load.kind, load.tokens, load.max_tokens, load.clients, load.batch
