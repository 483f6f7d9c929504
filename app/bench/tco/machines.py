"""The machine that a result was measured on, and the sizes of its family that the result is scaled to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Result
from app.bench.stats import MeasurementFailed
from app.bench.tco.prices import Family, Prices, Size


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine size to which a result applies.

    `share`: its rate and watts relative to the measured machine, which has 1. `watts` is from the price table, or
    None; measured watts take precedence.
    """

    name: str
    architecture: str
    vcpus: int
    cores: int
    share: float
    dollars_an_hour: float | None
    watts: float | None
    watts_basis: str


def machines_of(result: Result, prices: Prices) -> list[Machine]:
    """Return the named instance and the sizes of its family with more memory than the weights, small to large.

    If the result names no instance, or one that is not in the table, return the measured machine alone.

    Raises:
        MeasurementFailed: The named instance differs from the machine that was measured.
    """
    found = None if result.instance is None else prices.find(result.instance)
    if found is None:
        return [_itself(result)]
    family, measured = found
    _same_machine(result, family, measured)
    weights = _weight_bytes(result)
    able = [size for size in family.sizes if size == measured or (family.memory_bytes(size) or weights + 1) > weights]
    return [_sized(result, family, measured, size) for size in sorted(able, key=family.units)]


def _sized(result: Result, family: Family, measured: Size, size: Size) -> Machine:
    """Return the machine of one size. For the measured size, the operator's price takes precedence."""
    own = result.hourly_price if size == measured else None
    return Machine(
        name=size.name,
        architecture=family.architecture,
        vcpus=size.vcpus,
        cores=family.cores(size),
        share=family.units(size) / family.units(measured),
        dollars_an_hour=own or size.dollars_an_hour,
        watts=family.watts(size),
        watts_basis="" if family.power is None else family.power.basis,
    )


def _itself(result: Result) -> Machine:
    facts = _facts(result)
    return Machine(
        name=result.instance or result.name,
        architecture="gpu" if _device(result) in ("cuda", "mps") else str(facts.get("architecture", "")),
        vcpus=sum(len(core["cpu_ids"]) for core in facts.get("cores", [])),
        cores=len(facts.get("cores", [])),
        share=1.0,
        dollars_an_hour=result.hourly_price,
        watts=result.watts,
        watts_basis="declared",
    )


def _same_machine(result: Result, family: Family, size: Size) -> None:
    reasons = list(_differences(_facts(result), family, size))
    if reasons:
        raise MeasurementFailed(
            f"{result.name} was not measured on a whole {size.name}: {reasons[0]}. Name the size that it was measured on."
        )


def _differences(facts: Mapping[str, Any], family: Family, size: Size) -> Iterator[str]:
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


def _facts(result: Result) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = result.info.get("facts") or {}
    return facts


def _weight_bytes(result: Result) -> int:
    """Return the size of the weights as they are served, or 0 if the plan does not say."""
    return int(((result.info.get("plan") or {}).get("weight_bytes") or {}).get("value") or 0)


def _device(result: Result) -> str | None:
    device = ((result.info.get("plan") or {}).get("device") or {}).get("value")
    return None if device is None else str(device)
