"""Statistics of a result's steps: how long they take, how much longer the slow ones take, and the causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from armature_bench.compare.result import CompareResult, StepColumns
from armature_bench.console import percentile

CAUSE_DESCRIPTIONS: dict[str, str] = {
    "prefill": "a prompt was processed in the same step",
    "page_fault": "memory was touched for the first time, or had been reclaimed",
    "garbage_collection": "Python ran its garbage collector",
    "throttled": "the CPU quota of the control group was used up",
    "compiled": "the first step of its shape, which was recorded or compiled",
    "preempted": "a sequence was preempted and had to be computed again",
    "thermal": "heat slowed the processor down",
    "frequency": "the processor ran below 0.8 of its typical frequency",
    "descheduled": "another process used a core",
    "unknown": "none of these",
}


@dataclass(frozen=True, slots=True)
class PhaseStatistics:
    """Steps of one phase over all loads, in seconds.

    `over_usual` are the same percentiles (without p50) of the ratio to the usual time of steps of that size.
    """

    name: str
    num_steps: int
    seconds: tuple[float, float, float, float]  # p50, p99, p99.9, the longest
    over_usual: tuple[float, float, float]  # p99, p99.9, the longest


@dataclass(frozen=True, slots=True)
class CauseStatistics:
    """Slow steps of one cause: their number, their share of all steps, and the longest.

    `lost_share` is the time that they took beyond the usual, as a share of the time of all steps.
    """

    name: str
    num_steps: int
    share: float
    longest_seconds: float
    lost_share: float


@dataclass(frozen=True, slots=True)
class _StepTime:
    phase: str
    seconds: float
    usual: float
    cause: str


def phase_statistics(result: CompareResult) -> list[PhaseStatistics]:
    steps = list(_steps(result))
    names = dict.fromkeys(step.phase for step in steps)
    return [_phase_statistics(name, [step for step in steps if step.phase == name]) for name in names]


def cause_statistics(result: CompareResult) -> list[CauseStatistics]:
    """Return the statistics of each cause, the most time lost first."""
    steps = list(_steps(result))
    slow = [step for step in steps if step.cause]
    whole = math.fsum(step.seconds for step in steps)
    names = dict.fromkeys(step.cause for step in slow)
    found = [
        _cause_statistics(name, [step for step in slow if step.cause == name], len(steps), whole) for name in names
    ]
    return sorted(found, key=lambda cause: -cause.lost_share)


def _phase_statistics(name: str, steps: Sequence[_StepTime]) -> PhaseStatistics:
    seconds, beyond = [step.seconds for step in steps], [step.seconds / step.usual for step in steps]
    first, second, third = (percentile(beyond, share) for share in (0.99, 0.999, 1.0))
    took = tuple(percentile(seconds, share) for share in (0.5, 0.99, 0.999, 1.0))
    return PhaseStatistics(name, len(steps), (took[0], took[1], took[2], took[3]), (first, second, third))


def _cause_statistics(name: str, steps: Sequence[_StepTime], total: int, whole: float) -> CauseStatistics:
    lost = math.fsum(max(0.0, step.seconds - step.usual) for step in steps)
    return CauseStatistics(name, len(steps), len(steps) / total, max(step.seconds for step in steps), lost / whole)


def _steps(result: CompareResult) -> Iterator[_StepTime]:
    """Yield each step with the median time of steps of its phase and approximate size at the same load."""
    for point in result.points:
        usual = _median_seconds(point.steps)
        for phase, tokens, seconds, cause in _rows(point.steps):
            if seconds > 0:
                yield _StepTime(phase, seconds, usual[phase, tokens.bit_length()], cause)


def _median_seconds(steps: StepColumns) -> dict[tuple[str, int], float]:
    """Return the median time by phase and number of bits of the token count (sizes within a power of two)."""
    found: dict[tuple[str, int], list[float]] = {}
    for phase, tokens, seconds, _ in _rows(steps):
        found.setdefault((phase, tokens.bit_length()), []).append(seconds)
    return {size: median(values) for size, values in found.items()}


def _rows(steps: StepColumns) -> Iterator[tuple[str, int, float, str]]:
    return zip(steps.phase, steps.tokens, steps.seconds, steps.cause, strict=True)
