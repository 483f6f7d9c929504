"""Conditions during a load: CPU time used by the server, this client and other processes, throttling, and energy.

Counters are read before and after a load and the differences are reported. The server's counters come from its
`/metrics`. If the server runs on this machine, host counters come from this machine's `/proc`.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.bench.client import Client
from app.bench.compare.result import Energy

SHORTEST_SECONDS = 1.0  # CPU time is counted in hundredths of a second: for a shorter interval no ratio is reported
_JOULES = re.compile(r'armature_energy_joules_total{source="(\w+)"}')
_THROTTLED = "process_cgroup_cpu_throttled_seconds_total"
_SERVER_CPU = "process_cpu_seconds_total"
_MODELLED = "modelled"


@dataclass(frozen=True, slots=True)
class Host:
    """CPU seconds of the cores that this process may use.

    `busy`: used by any program. `stolen`: taken by the host of a virtual machine (steal). `pressure_seconds`: seconds
    during which at least one thread waited for a core; None if the kernel does not report it.
    """

    busy: float
    stolen: float
    num_cores: int
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of all counters at `moment` (`time.perf_counter`)."""

    moment: float
    counters: Mapping[str, float]
    client_cpu: float
    host: Host | None

    @property
    def joules(self) -> Mapping[str, float]:
        """Joules by source, measured sources first and the modelled source last."""
        found = {match[1]: value for name, value in self.counters.items() if (match := _JOULES.fullmatch(name)) is not None}
        return {source: found[source] for source in sorted(found, key=lambda each: each == _MODELLED)}


@dataclass(frozen=True, slots=True)
class Circumstances:
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

    def energy(self, seconds: float, idle_watts: float | None) -> Energy | None:
        """Return the energy of a load that took `seconds`, or None if power is unknown."""
        if self.watts is None:
            return None
        return Energy(joules=round(self.watts * seconds, 6), source=self.source, idle_watts=idle_watts)


async def read(client: Client, local: bool) -> Reading:
    """Read all counters. `local`: the server runs on this machine.

    Raises:
        RequestBroken: The server did not return its metrics.
    """
    asked = time.perf_counter()
    counters = await client.counters()
    moment = (asked + time.perf_counter()) / 2
    return Reading(moment, counters, time.process_time(), host() if local else None)


def between(before: Reading, after: Reading) -> Circumstances:
    """Return the conditions between two readings.

    The CPU ratios are None if the readings are less than `SHORTEST_SECONDS` apart.
    """
    seconds = after.moment - before.moment
    watts, source = _watts(before, after, seconds)
    throttled = _difference(before, after, _THROTTLED)
    known = Circumstances(None if throttled is None else round(throttled, 6), watts=watts, source=source)
    if seconds < SHORTEST_SECONDS:
        return known
    client = (after.client_cpu - before.client_cpu) / seconds
    stolen, pressure = _taken(before, after, seconds)
    return Circumstances(known.throttled_seconds, stolen, round(client, 4), pressure, watts, source)


def host(proc: Path = Path("/proc")) -> Host | None:
    """Return the CPU seconds of this machine, or None on a system without `/proc/stat`."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        allowed, tick = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return None
    columns = [line.split() for line in lines if re.match(r"cpu\d", line)]
    ticks = [[int(number) for number in words[1:9]] for words in columns if int(words[0][3:]) in allowed]
    busy = sum(user + nice + system + irq + soft for user, nice, system, _idle, _waits, irq, soft, _stolen in ticks)
    return Host(busy / tick, sum(numbers[7] for numbers in ticks) / tick, len(ticks), _waiting(proc))


def _waiting(proc: Path) -> float | None:
    try:
        some = (proc / "pressure" / "cpu").read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _taken(before: Reading, after: Reading, seconds: float) -> tuple[float | None, float | None]:
    """Return the share of all cores that the server and this client did not get, and the share of waiting time.

    The first counts cores used by other processes or stolen by the host; the second, time in which some thread waited
    for a core.
    """
    if before.host is None or after.host is None or not after.host.num_cores:
        return None, None
    waited = None
    if before.host.waiting is not None and after.host.waiting is not None:
        waited = round((after.host.waiting - before.host.waiting) / seconds, 4)
    server = _difference(before, after, _SERVER_CPU)
    if server is None:
        return None, waited
    ours = server + after.client_cpu - before.client_cpu
    others = after.host.busy - before.host.busy - ours + after.host.stolen - before.host.stolen
    return round(max(0.0, others) / (after.host.num_cores * seconds), 4), waited


def _watts(before: Reading, after: Reading, seconds: float) -> tuple[float | None, str]:
    for source, joules in after.joules.items():
        used = joules - before.joules.get(source, math.inf)
        if used >= 0 and seconds > 0:
            return round(used / seconds, 6), source
    return None, ""


def _difference(before: Reading, after: Reading, name: str) -> float | None:
    """Return the increase of one counter, or None if it is missing or was reset between the readings."""
    if name not in before.counters or name not in after.counters:
        return None
    difference = after.counters[name] - before.counters[name]
    return difference if difference >= 0 else None
