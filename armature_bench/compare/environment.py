"""Conditions during a load, and the reasons to doubt the figures of a result, one sentence each.

Counters are read before and after a load and the differences are reported. The server's counters come from its
`/metrics`; if it runs on this machine, host counters come from `/proc`.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armature_bench.compare.result import LoadPoint, PointEnergy
from armature_bench.http.client import ArmatureClient

SHORTEST_SECONDS = 1.0  # CPU time is counted in hundredths of a second: for a shorter interval no ratio is reported
_JOULES = re.compile(r'armature_energy_joules_total{source="(\w+)"}')
_THROTTLED = "process_cgroup_cpu_throttled_seconds_total"
_SERVER_CPU = "process_cpu_seconds_total"
_MODELLED = "modelled"


@dataclass(frozen=True, slots=True)
class HostCpuTimes:
    """CPU seconds of the cores that this process may use.

    `busy`: used by any program. `stolen`: taken by the host of a virtual machine (steal). `pressure_seconds`: at least
    one thread waited for a core; None if the kernel does not report it.
    """

    busy: float
    stolen: float
    num_cores: int
    pressure_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ResourceReading:
    """One reading of all counters at `moment` (`time.perf_counter`)."""

    moment: float
    counters: Mapping[str, float]
    client_cpu: float
    host: HostCpuTimes | None

    @property
    def joules(self) -> Mapping[str, float]:
        """Joules by source, measured sources first and the modelled source last."""
        found = {
            match[1]: value for name, value in self.counters.items() if (match := _JOULES.fullmatch(name)) is not None
        }
        return {source: found[source] for source in sorted(found, key=lambda each: each == _MODELLED)}


@dataclass(frozen=True, slots=True)
class LoadConditions:
    """The columns of a `LoadPoint` that do not come from its requests. `watts` is a mean over the load."""

    throttled_seconds: float | None = None
    stolen_ratio: float | None = None
    client_cpu_ratio: float | None = None
    pressure_ratio: float | None = None
    watts: float | None = None
    source: str = ""

    @property
    def idle_watts(self) -> float | None:
        """Mean watts without load; None if energy is modelled, since the model counts idle power as 0."""
        return None if self.source == _MODELLED else self.watts

    def energy(self, seconds: float, idle_watts: float | None) -> PointEnergy | None:
        """Return the energy of a load that took `seconds`, or None if power is unknown."""
        if self.watts is None:
            return None
        return PointEnergy(joules=round(self.watts * seconds, 6), source=self.source, idle_watts=idle_watts)


async def read_resources(client: ArmatureClient, local: bool) -> ResourceReading:
    """Read all counters. `local`: the server runs on this machine. Raises `HttpRequestFailed` without metrics."""
    asked = time.perf_counter()
    counters = await client.counters()
    moment = (asked + time.perf_counter()) / 2
    return ResourceReading(moment, counters, time.process_time(), read_host_cpu_times() if local else None)


def conditions_between(before: ResourceReading, after: ResourceReading) -> LoadConditions:
    """Return the conditions between two readings.

    The CPU ratios are None if the readings are less than `SHORTEST_SECONDS` apart.
    """
    seconds = after.moment - before.moment
    watts, source = _watts(before, after, seconds)
    throttled = _difference(before, after, _THROTTLED)
    known = LoadConditions(None if throttled is None else round(throttled, 6), watts=watts, source=source)
    if seconds < SHORTEST_SECONDS:
        return known
    client = (after.client_cpu - before.client_cpu) / seconds
    stolen, pressure = _contention_ratios(before, after, seconds)
    return LoadConditions(known.throttled_seconds, stolen, round(client, 4), pressure, watts, source)


def read_host_cpu_times(proc: Path = Path("/proc")) -> HostCpuTimes | None:
    """Return the CPU seconds of this machine, or None on a system without `/proc/stat`."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        allowed, tick = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return None
    columns = [line.split() for line in lines if re.match(r"cpu\d", line)]
    ticks = [[int(number) for number in fields[1:9]] for fields in columns if int(fields[0][3:]) in allowed]
    busy = sum(user + nice + system + irq + soft for user, nice, system, _idle, _waits, irq, soft, _stolen in ticks)
    return HostCpuTimes(
        busy / tick, sum(numbers[7] for numbers in ticks) / tick, len(ticks), _cpu_pressure_seconds(proc)
    )


def _cpu_pressure_seconds(proc: Path) -> float | None:
    try:
        some = (proc / "pressure" / "cpu").read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _contention_ratios(
    before: ResourceReading, after: ResourceReading, seconds: float
) -> tuple[float | None, float | None]:
    """Return the share of all cores that the server and this client did not get, and the share of waiting time.

    The first counts cores used by other processes or stolen by the host; the second, time in which some thread waited
    for a core.
    """
    if before.host is None or after.host is None or not after.host.num_cores:
        return None, None
    waited = None
    if before.host.pressure_seconds is not None and after.host.pressure_seconds is not None:
        waited = round((after.host.pressure_seconds - before.host.pressure_seconds) / seconds, 4)
    server = _difference(before, after, _SERVER_CPU)
    if server is None:
        return None, waited
    ours = server + after.client_cpu - before.client_cpu
    others = after.host.busy - before.host.busy - ours + after.host.stolen - before.host.stolen
    return round(max(0.0, others) / (after.host.num_cores * seconds), 4), waited


def _watts(before: ResourceReading, after: ResourceReading, seconds: float) -> tuple[float | None, str]:
    for source, joules in after.joules.items():
        used = joules - before.joules.get(source, math.inf)
        if used >= 0 and seconds > 0:
            return round(used / seconds, 6), source
    return None, ""


def _difference(before: ResourceReading, after: ResourceReading, name: str) -> float | None:
    """Return the increase of one counter, or None if it is missing or was reset between the readings."""
    if name not in before.counters or name not in after.counters:
        return None
    difference = after.counters[name] - before.counters[name]
    return difference if difference >= 0 else None


MAX_THROTTLED_RATIO = 0.01  # fraction of a load's seconds
MAX_STOLEN_RATIO = 0.05  # fraction of all cores
MAX_CLIENT_CPU_RATIO = 0.5  # fraction of one core
MAX_REPEAT_RATIO = 1.1  # fastest over slowest measurement of the same load


@dataclass(frozen=True, slots=True)
class MeasurementFacts:
    """All that the caveats of one measurement are derived from.

    `info` was read when the first load began, `info_after` after the last one. `repeats` are later measurements of the
    first load.
    """

    info: Mapping[str, Any]
    info_after: Mapping[str, Any]
    version: str
    url: str | None
    local: bool
    points: Sequence[LoadPoint]
    repeats: Sequence[LoadPoint] = ()
    lost_steps: int = 0
    caveats: Sequence[str] = field(
        default=()
    )  # sentences collected while measuring: loads that were left out, why it ended early

    @property
    def loads(self) -> list[LoadPoint]:
        return [*self.points, *self.repeats]


def measurement_caveats(measured: MeasurementFacts) -> list[str]:
    return [*measured.caveats, *_server_caveats(measured), *_machine_caveats(measured), *_client_caveats(measured)]


def _server_caveats(measured: MeasurementFacts) -> Iterator[str]:
    version = measured.info.get("version")
    if version != measured.version:
        yield f"The server has version {version}, the client that measured it has version {measured.version}."
    calibration = measured.info.get("calibration")
    fallback = "" if calibration is None else calibration["measurements"]["fallback"]
    if calibration is None:
        yield "The machine was not calibrated: the plan was made from hardware facts alone."
    elif fallback:
        yield f"The machine was not calibrated, since {fallback}: the plan was made from hardware facts alone."
    speed = measured.info_after.get("speed") or {}
    if speed.get("drifted"):
        factors = ", ".join(f"{phase} {factor:.2f}" for phase, factor in speed["steps_over_measured"].items())
        yield f"Steps did not take the time that calibration had measured ({factors} times as long): the machine's speed has changed."
    failed = sum((Counter(point.failures) for point in measured.loads), Counter[str]())
    if failed:
        kinds = ", ".join(f"{kind} ({number})" for kind, number in sorted(failed.items()))
        yield f"{failed.total()} requests failed: {kinds}."
    if measured.lost_steps:
        yield f"{measured.lost_steps} of the engine's steps are missing: there were more steps than the server or the result file keeps."


def _machine_caveats(measured: MeasurementFacts) -> Iterator[str]:
    if not measured.local:
        yield (
            f"The server was reached over a network, at {measured.url}: latencies include the network, and other load on its machine "
            "is unknown."
        )
    throttled = [
        point for point in measured.loads if (point.throttled_seconds or 0.0) > MAX_THROTTLED_RATIO * point.seconds
    ]
    if throttled:
        seconds = sum(point.throttled_seconds or 0.0 for point in throttled)
        yield f"The server was throttled to its CPU quota, for {seconds:.1f} s in {_share_of_loads(throttled, measured)}."
    yield from _caveat_above(
        measured,
        MAX_STOLEN_RATIO,
        lambda point: point.stolen_ratio,
        "Other processes took up to {:.0%} of all cores, in {}.",
    )
    again = [measured.points[0], *measured.repeats]
    rates = [point.samples_per_second for point in again]
    if min(rates) * MAX_REPEAT_RATIO < max(rates):
        shown = ", ".join(f"{rate:.4g}" for rate in rates)
        yield f"The machine was not steady: repeated measurements of one load ({again[0].load.name}) reached {shown} samples a second."


def _client_caveats(measured: MeasurementFacts) -> Iterator[str]:
    lacked = ", which the server could not use" if measured.local else ""
    sentence = f"The measuring client took up to {{:.0%}} of a core{lacked}, in {{}}."
    yield from _caveat_above(measured, MAX_CLIENT_CPU_RATIO, lambda point: point.client_cpu_ratio, sentence)


def _caveat_above(
    measured: MeasurementFacts, bound: float, read: Callable[[LoadPoint], float | None], sentence: str
) -> Iterator[str]:
    """Yield `sentence` with the highest ratio and the number of loads above `bound`, if there are any."""
    found = [(ratio, point) for point in measured.loads if (ratio := read(point)) is not None and ratio > bound]
    if found:
        yield sentence.format(
            max(ratio for ratio, _ in found), _share_of_loads([point for _, point in found], measured)
        )


def _share_of_loads(points: Sequence[LoadPoint], measured: MeasurementFacts) -> str:
    """Return text such as `3 of 14 loads`."""
    return f"{len(points)} of {len(measured.loads)} loads"
