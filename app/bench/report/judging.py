"""The notes that precede each result's figures in a report, and the refusal to compare different models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Result
from app.bench.report.loads import cases_of, load_name, part
from app.bench.stats import MeasurementFailed

_MEMORY_ALIKE = 0.1  # kernels reserve different amounts, and hosts may balloon memory of a virtual machine


@dataclass(frozen=True, slots=True)
class Here:
    """The program's version where the report is made, and that machine's facts in the form of `/info`."""

    version: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """The notes on one result. `doubts`: reasons why figures may be wrong. `remarks`: where they come from."""

    name: str
    doubts: tuple[str, ...]
    remarks: tuple[str, ...]


def check_comparable(results: Sequence[Result], force: bool) -> None:
    """Refuse results of different models unless `force` is given.

    Raises:
        MeasurementFailed: The models differ in size or shape.
    """
    first = results[0]
    for other in results[1:]:
        differs = _different(first.model_shape, other.model_shape)
        if differs and not force:
            raise MeasurementFailed(
                f"{first.name} and {other.name} are of different models ({'; '.join(differs)}): their figures do not compare the "
                f"machines. --force compares them anyway, and the report says so."
            )


def judge(results: Sequence[Result], here: Here) -> list[Judged]:
    """Return the notes on each result, in order."""
    return [
        Judged(name, (*_doubts(result, results), *_unlike(result, results[0])), _remarks(result, here))
        for result, name in zip(results, names_of(results), strict=True)
    ]


def names_of(results: Sequence[Result]) -> list[str]:
    """Return the name of each result in the report, numbered where several have the same name."""
    given = [result.name for result in results]
    return [name if given.count(name) == 1 else f"{name} ({given[: index + 1].count(name)})" for index, name in enumerate(given)]


def _doubts(result: Result, results: Sequence[Result]) -> list[str]:
    found = list(result.doubts)
    if not result.complete and not found:
        found.append("Incomplete: the measurement was interrupted.")
    for point in result.points:
        if point.failures:
            failures = ", ".join(f"{number} × {reason}" for reason, number in sorted(point.failures.items()))
            asked = len(point.request_seconds) + sum(point.failures.values())
            found.append(f"Some of {asked} requests failed at {load_name(point.load)}: {failures}.")
    forced = part(result.info, "facts", "native").get("forced")
    if forced:
        found.append(f"Its kernels were forced to {forced}, although the processor may support more.")
    own = {point.load for point in result.points}
    missing = [load_name(case.load) for case in cases_of(results) if case.load not in own]
    if missing:
        found.append(f"Not measured here, but in another result: {_few(missing)}.")
    return found


def _unlike(result: Result, first: Result) -> list[str]:
    """Return how a result differs from the first in more than the machine and its plan."""
    found = []
    differs = _different(first.model_shape, result.model_shape)
    if differs:
        found.append(f"The model differs from that of the first result ({'; '.join(differs)}): compared because of --force.")
    versions = [str(each.info.get("version")) for each in (first, result)]
    if versions[0] != versions[1]:
        found.append(f"The server has version {versions[1]}, that of the first result {versions[0]}.")
    builds = [torch_of(each) for each in (first, result)]
    if builds[0] != builds[1]:
        found.append(f"It ran with torch {builds[1]}, the first result with {builds[0]}.")
    return found


def _remarks(result: Result, here: Here) -> tuple[str, ...]:
    facts = part(result.info, "facts")
    found = []
    if not same_machine(facts, here.facts):
        found.append(
            f"Measured on another machine ({machine_name(facts)}) than the one that made this report ({machine_name(here.facts)})."
        )
    version = str(result.info.get("version"))
    if version != here.version:
        found.append(f"Measured with version {version}; this report was made with {here.version}.")
    if result.url is not None:
        found.append(f"Measured on a server that was already running, at {result.url}.")
    return tuple(found)


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sets of facts describe equal machines, by hardware and not by name."""
    sizes = [facts.get("memory_bytes") or 0 for facts in (one, other)]
    kinds = [(facts.get("cpu"), facts.get("architecture"), len(facts.get("cores", ()))) for facts in (one, other)]
    return kinds[0] == kinds[1] and max(sizes) - min(sizes) <= _MEMORY_ALIKE * max(sizes)


def machine_name(facts: Mapping[str, Any]) -> str:
    """Return a name such as `Intel Xeon @ 2.50GHz, 8 cores`."""
    cpu = part(facts, "cpu")
    vendor, name = str(cpu.get("vendor", "")), str(cpu.get("name", "an unknown processor"))
    told = cpu.get("product") or (name if vendor in name else f"{vendor} {name}")
    cores = len(facts.get("cores", ()))
    return f"{told}, {cores} core{'s' * (cores != 1)}"


def torch_of(result: Result) -> str:
    """Return the torch version without its build suffix."""
    return str(part(result.info, "facts", "torch").get("version", "of unknown version")).partition("+")[0]


def _different(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return descriptions such as `hidden size 2048 and 4096`, at most three."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return [f"{name.replace('_', ' ')} {first.get(name)} and {other.get(name)}" for name in names[:3]]


def _few(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
