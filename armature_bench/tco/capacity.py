"""Capacity: the target load, the highest measured load within a p99, and machine sizes.

Only measured points count: there is no interpolation or extrapolation. A result is scaled to the other sizes of the
family of the machine it was measured on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec
from armature_bench.console import MeasurementFailed, percentile
from armature_bench.tco.prices import HOURS_A_YEAR, InstanceFamily, InstanceSize, PriceTable

Unit = Literal["samples", "tokens"]
SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400, "d": 86400}
UNITS: dict[str, Unit] = {
    "": "samples",
    **dict.fromkeys(
        ("sample", "samples", "req", "request", "requests", "text", "texts", "vector", "vectors", "rows"), "samples"
    ),
    **dict.fromkeys(("tok", "token", "tokens"), "tokens"),
}
TARGET_PATTERN = re.compile(r"\s*(?P<number>[-+0-9.,_e]+?)\s*(?P<word>[a-z]*)\s*/\s*(?P<time>[a-z]+)\s*", re.IGNORECASE)

THOUSANDS_PATTERN = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class ServingTarget:
    """A rate per second.

    Samples are whole answers: generations, vectors, rows. Tokens are of a decoder's answers or an encoder's texts.
    """

    per_second: float
    unit: Unit = "samples"

    def __str__(self) -> str:
        return f"{self.per_second:,.10g} {self.unit} a second"


def parse_target(text: str) -> ServingTarget:
    """Parse `10000/s`, `1e6/day` or `5000tok/s`. Raises a `MeasurementFailed` that says what would be right."""
    shape = TARGET_PATTERN.fullmatch(text)
    if shape is None:
        raise MeasurementFailed(
            f"--target {text!r} is not understood: write 10000/s, 600/min, 1e6/day or 5000tok/s, for example."
        )
    word, time = shape["word"].lower(), shape["time"].lower()
    if time not in SECONDS:
        raise MeasurementFailed(f"--target {text!r}: {time!r} is not a unit of time; use s, min, h or day.")
    if word not in UNITS:
        raise MeasurementFailed(f"--target {text!r}: {word!r} is not a known unit; use samples or tok.")
    per_second = _number(shape["number"], text) / SECONDS[time]
    if not per_second > 0 or math.isinf(per_second):
        raise MeasurementFailed(f"--target {text!r} must be above 0 and finite.")
    return ServingTarget(per_second, UNITS[word])


def _number(digits: str, text: str) -> float:
    """Parse a number. Commas may only separate thousands: `1,5` might mean one and a half."""
    try:
        return float(digits.replace(",", "") if THOUSANDS_PATTERN.fullmatch(digits) else digits)
    except ValueError:
        raise MeasurementFailed(f"--target {text!r}: {digits!r} is not a number.") from None


SERVER_PRICE = "server"  # the basis of a price that the measured server was given (--hourly-price)
MIN_REQUESTS_FOR_P99 = 100  # requests; with fewer, the p99 is the slowest request


@dataclass(frozen=True, slots=True)
class WorkKind:
    """The kind of work of a sample. Loads that differ in this cannot be compared.

    `tokens` is the length of a prompt or text, `max_tokens` of its answer.
    """

    kind: str
    tokens: int
    max_tokens: int

    def __str__(self) -> str:
        if self.kind == "generate":
            return f"answers of {self.max_tokens} tokens to prompts of {self.tokens}"
        return f"texts of {self.tokens} tokens" if self.kind == "embed" else "rows"


@dataclass(frozen=True, slots=True)
class SustainedLoad:
    """The load with the highest rate within the p99 limit.

    `rate` and `peak` are in the target's unit per second; `peak` is the highest rate of any load. `p99` is in seconds,
    of a whole request.
    """

    load: LoadSpec
    rate: float
    peak: float
    p99: float | None
    num_requests: int
    samples_per_second: float
    tokens_per_second: float
    watts: float | None
    watts_source: str

    @property
    def utilisation(self) -> float:
        """The usable share of this machine's peak rate."""
        return self.rate / self.peak


@dataclass(frozen=True, slots=True)
class P99Exceeded:
    """No load was within the p99 limit. `least_p99`: the lowest p99 in seconds; None if no request was timed."""

    least_p99: float | None


def points_by_work(result: CompareResult) -> dict[WorkKind, list[LoadPoint]]:
    """Return the points of each kind of work, without points in which a request failed."""
    found: dict[WorkKind, list[LoadPoint]] = {}
    for point in result.points:
        if point.samples > 0 and not point.failures:
            found.setdefault(WorkKind(point.load.kind, point.load.tokens, point.load.max_tokens), []).append(point)
    return found


def best_sustained_load(points: Sequence[LoadPoint], unit: Unit, limit: float | None) -> SustainedLoad | P99Exceeded:
    """Return the best load of one kind of work with a p99 of at most `limit` seconds; None: no limit."""
    keeping = [point for point in points if limit is None or _is_within(point, limit)]
    if not keeping:
        return P99Exceeded(min((p99 for point in points if (p99 := point_p99(point)) is not None), default=None))
    best = max(keeping, key=lambda point: _rate(point, unit))
    energy = best.energy
    return SustainedLoad(
        load=best.load,
        rate=_rate(best, unit),
        peak=max(_rate(point, unit) for point in points),
        p99=point_p99(best),
        num_requests=len(best.request_seconds),
        samples_per_second=best.samples_per_second,
        tokens_per_second=best.tokens_per_second,
        watts=None if energy is None else energy.joules / best.seconds,
        watts_source="" if energy is None else energy.source,
    )


def point_p99(point: LoadPoint) -> float | None:
    """Return the p99 of a point in seconds, or None if no request was timed."""
    return percentile(point.request_seconds, 0.99) if point.request_seconds else None


def _is_within(point: LoadPoint, limit: float) -> bool:
    p99 = point_p99(point)
    return p99 is not None and p99 <= limit


def _rate(point: LoadPoint, unit: Unit) -> float:
    return point.samples_per_second if unit == "samples" else point.tokens_per_second


@dataclass(frozen=True, slots=True)
class MachineOption:
    """A machine size to which a result applies.

    `share`: its rate and watts relative to the measured machine, which has 1. `price_basis` is "server" for the price
    that the measured server was given, else "list" or "bought". `watts` is from the price table, or None; measured
    watts take precedence.
    """

    name: str
    architecture: str
    vcpus: int
    cores: int
    share: float
    dollars_an_hour: float | None
    price_basis: str
    watts: float | None
    watts_basis: str


def machine_options(
    result: CompareResult, prices: PriceTable, hours_a_year: float = HOURS_A_YEAR
) -> list[MachineOption]:
    """Return the named instance and the sizes of its family with more memory than the weights, small to large.

    If the result names no instance, or one that is not in the table, return the measured machine alone. Raises
    `MeasurementFailed` if the named instance differs from the machine that was measured.
    """
    found = None if result.instance is None else prices.find(result.instance)
    if found is None:
        return [_measured_machine(result)]
    family, measured = found
    _check_instance(result, family, measured)
    weights = _weight_bytes(result)
    able = [size for size in family.sizes if size == measured or (family.memory_bytes(size) or weights + 1) > weights]
    return [_machine_option(result, family, measured, size, hours_a_year) for size in sorted(able, key=family.units)]


def _machine_option(
    result: CompareResult, family: InstanceFamily, measured: InstanceSize, size: InstanceSize, hours_a_year: float
) -> MachineOption:
    """Return the machine of one size. For the measured size, the operator's price takes precedence."""
    own = result.hourly_price if size == measured else None
    return MachineOption(
        name=size.name,
        architecture=family.architecture,
        vcpus=size.vcpus,
        cores=family.cores(size),
        share=family.units(size) / family.units(measured),
        dollars_an_hour=own or size.hourly_cost(hours_a_year),
        price_basis=SERVER_PRICE if own else size.price_basis,
        watts=family.watts(size),
        watts_basis="" if family.power is None else family.power.basis,
    )


def _measured_machine(result: CompareResult) -> MachineOption:
    facts = _facts(result)
    return MachineOption(
        name=result.instance or result.name,
        architecture="gpu" if _device(result) in ("cuda", "mps") else str(facts.get("architecture", "")),
        vcpus=sum(len(core["cpu_ids"]) for core in facts.get("cores", [])),
        cores=len(facts.get("cores", [])),
        share=1.0,
        dollars_an_hour=result.hourly_price,
        price_basis="" if result.hourly_price is None else SERVER_PRICE,
        watts=result.watts,
        watts_basis="declared",
    )


def _check_instance(result: CompareResult, family: InstanceFamily, size: InstanceSize) -> None:
    reasons = list(_differences(_facts(result), family, size))
    if reasons:
        raise MeasurementFailed(
            f"{result.name} was not measured on a whole {size.name}: {reasons[0]}. Name the size that it was measured on."
        )


def _differences(facts: Mapping[str, Any], family: InstanceFamily, size: InstanceSize) -> Iterator[str]:
    """Yield how the facts differ from the instance. A missing fact is not a difference.

    A family with GPUs is not compared by processor architecture.
    """
    cpus, architecture = sum(len(core["cpu_ids"]) for core in facts.get("cores", [])), facts.get("architecture")
    quota = (facts.get("cgroup") or {}).get("quota_cores")
    if family.architecture != "gpu" and architecture is not None and architecture != family.architecture:
        yield f"the instance is {family.architecture}, the measured machine is {architecture}"
    if cpus and cpus != size.vcpus:
        yield f"the instance has {size.vcpus} vCPUs, the measured machine has {cpus}"
    if quota is not None and quota < size.vcpus:
        yield f"the instance has {size.vcpus} vCPUs, the server was limited to {quota:g}"


def _facts(result: CompareResult) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = result.info.get("facts") or {}
    return facts


def _weight_bytes(result: CompareResult) -> int:
    """Return the size of the weights as they are served, or 0 if the plan does not say."""
    return int(((result.info.get("plan") or {}).get("weight_bytes") or {}).get("value") or 0)


def _device(result: CompareResult) -> str | None:
    device = ((result.info.get("plan") or {}).get("device") or {}).get("value")
    return None if device is None else str(device)
