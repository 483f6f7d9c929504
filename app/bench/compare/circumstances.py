"""What happened around a load: processor time and who took it, throttling, energy. Read before and after; the difference is told.

The server's own counters come from its `/metrics`; what else its machine did, from `/proc` of this one where that is the same machine.
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

SHORTEST_SECONDS = 1.0  # processor time is counted in hundredths of a second: of less than this nothing is told
_JOULES = re.compile(r'armature_energy_joules_total{source="(\w+)"}')
_THROTTLED = "process_cgroup_cpu_throttled_seconds_total"
_SERVER_CPU = "process_cpu_seconds_total"
_MODELLED = "modelled"


@dataclass(frozen=True, slots=True)
class Host:
    """Processor seconds of this machine's cores that this process may use: in any program, and taken by the host of a virtual machine.

    `waiting`: seconds in which some thread waited for a core; None where the kernel does not say.
    """

    busy: float
    stolen: float
    num_cores: int
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One look, at a moment (`time.perf_counter`)."""

    moment: float
    counters: Mapping[str, float]
    client_cpu: float
    host: Host | None

    @property
    def joules(self) -> Mapping[str, float]:
        """By source; what was measured comes before what was worked out."""
        found = {match[1]: value for name, value in self.counters.items() if (match := _JOULES.fullmatch(name)) is not None}
        return {source: found[source] for source in sorted(found, key=lambda each: each == _MODELLED)}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The columns of a `Point` that are not of its requests. `watts` are a mean."""

    throttled_seconds: float | None = None
    stolen_ratio: float | None = None
    client_cpu_ratio: float | None = None
    pressure_ratio: float | None = None
    watts: float | None = None
    source: str = ""

    @property
    def idle_watts(self) -> float | None:
        """Where nothing was asked. A model of joules takes them for nothing, which they are not."""
        return None if self.source == _MODELLED else self.watts

    def energy(self, seconds: float, idle_watts: float | None) -> Energy | None:
        """Of so many seconds."""
        if self.watts is None:
            return None
        return Energy(joules=round(self.watts * seconds, 6), source=self.source, idle_watts=idle_watts)


async def read(client: Client, local: bool) -> Reading:
    """`local`: the server is on this machine. Raises `RequestBroken`."""
    asked = time.perf_counter()
    counters = await client.counters()
    moment = (asked + time.perf_counter()) / 2
    return Reading(moment, counters, time.process_time(), host() if local else None)


def between(before: Reading, after: Reading) -> Circumstances:
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
    """None where there is no such place to read."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        allowed, tick = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # no Linux
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
    """By others than the server and this client, of all cores; and how much of the time some thread waited for one."""
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
    """None where it is not counted, or was begun anew."""
    if name not in before.counters or name not in after.counters:
        return None
    difference = after.counters[name] - before.counters[name]
    return difference if difference >= 0 else None
