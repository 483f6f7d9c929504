"""Joules since the start, from whatever tells a machine's power: counters that begin anew, sensors read every second, or a declared model.

`joules()` is quick and never falls, and is called by one thread; what takes its time, or must be asked steadily, has a thread of its own.
"""

from __future__ import annotations

import plistlib
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Protocol
from xml.parsers.expat import ExpatError

from app.hardware.facts import PowerCounter, PowerMeter
from app.hardware.files import Files

Clock = Callable[[], float]
ReadWatts = Callable[[], float | None]

MICRO = 1e-6
SAMPLE_SECONDS = 1.0  # what power sensors tell is itself a mean of about so long
# Of one counter. What seems to be more has not begun anew at its end but was set to 0, as when a machine wakes.
MOST_WATTS = 5_000.0
MOST_BYTES = 2**20  # of one of powermetrics' lists: they have tens of kilobytes
POWERMETRICS = ["powermetrics", "--samplers", "cpu_power", "-f", "plist", "-i", str(int(SAMPLE_SECONDS * 1000))]


class Meter(Protocol):
    """`source` is the metrics' label: rapl, scmi, hwmon, powermetrics, nvml, modelled."""

    source: str

    def joules(self) -> float: ...
    def close(self) -> None: ...


class Counted:
    """Files that count microjoules. Must be read more often than the shortest of them begins anew: at 500 W that is two minutes."""

    def __init__(self, source: str, counters: tuple[PowerCounter, ...], files: Files, clock: Clock = time.monotonic) -> None:
        self.source = source
        self._counters, self._files, self._clock = counters, files, clock
        self._last: dict[str, tuple[float, int]] = {}
        self._microjoules = 0
        self.joules()

    def joules(self) -> float:
        """A file that cannot be read just now is caught up with by the next reading."""
        for counter in self._counters:
            now = self._files.number(counter.file)
            if now is not None:
                moment = self._clock()
                before, last = self._last.get(counter.file, (moment, now))
                self._microjoules += _counted(last, now, counter.wraps_at, moment - before)
                self._last[counter.file] = (moment, now)
        return self._microjoules * MICRO

    def close(self) -> None:
        """There is nothing to close."""


def _counted(last: int, now: int, wraps_at: int | None, seconds: float) -> int:
    """Microjoules from one reading to the next."""
    if now >= last:
        return now - last
    over = now + (wraps_at - last) if wraps_at is not None else now
    return over if over * MICRO <= MOST_WATTS * seconds else now


@dataclass(frozen=True, slots=True)
class _Sample:
    """Replaced whole by the thread that reads: whoever looks sees one moment."""

    at: float
    watts: float
    joules: float


class Sampled:
    """Power read again and again on a thread of its own, and added up: through a board's controller a reading takes many milliseconds."""

    def __init__(self, source: str, watts: ReadWatts, clock: Clock = time.monotonic) -> None:
        self.source = source
        self._watts, self._clock = watts, clock
        self._last: _Sample | None = None
        self._told = 0.0
        self._closed = threading.Event()

    def start(self) -> Sampled:
        threading.Thread(target=self._run, name="armature-power", daemon=True).start()
        return self

    def joules(self) -> float:
        """Since the last reading, as many watts as it said; where the next one says less, time catches up with what was told."""
        last = self._last
        if last is not None:
            since = min(self._clock() - last.at, 2 * SAMPLE_SECONDS)
            self._told = max(self._told, last.joules + last.watts * since)
        return self._told

    def close(self) -> None:
        self._closed.set()

    def sample(self) -> None:
        """Between two readings, the mean of both; one that fails is bridged."""
        watts, last, now = self._watts(), self._last, self._clock()
        if watts is not None:
            joules = 0.0 if last is None else last.joules + (last.watts + watts) / 2 * (now - last.at)
            self._last = _Sample(now, watts, joules)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.sample()
            self._closed.wait(SAMPLE_SECONDS)


class Powermetrics:
    """What a Mac's own tool prints, a property list each second. Not tried on a Mac yet."""

    source = "powermetrics"

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]] | None = None) -> None:
        self._joules = 0.0
        self._process = (start or _start_powermetrics)()

    def start(self) -> Powermetrics:
        assert self._process.stdout is not None, "it was started with a pipe"
        threading.Thread(target=self.follow, args=(self._process.stdout,), name="armature-power", daemon=True).start()
        return self

    def joules(self) -> float:
        return self._joules

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def follow(self, stream: IO[bytes]) -> None:
        """Until the stream ends."""
        text = b""
        for line in stream:
            text = text[-MOST_BYTES:] + line.lstrip(b"\0")  # lists are parted by zeros
            if b"</plist>" in line:
                self._joules += parse_powermetrics(text)
                text = b""


def _start_powermetrics() -> subprocess.Popen[bytes]:
    return subprocess.Popen(POWERMETRICS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def parse_powermetrics(text: bytes) -> float:
    """Joules of one sample: milliwatts of processor, graphics and neural engine together, times how long it took. 0 where it tells none."""
    try:
        fields = plistlib.loads(text)
        return float(fields["processor"]["combined_power"]) / 1e3 * float(fields["elapsed_ns"]) / 1e9
    except (plistlib.InvalidFileException, ExpatError, ValueError, KeyError, TypeError):
        return 0.0


class Modelled:
    """Declared watts for as long as steps run, and none between them: what the machine takes when idle is not known, and is not counted."""

    source = "modelled"

    def __init__(self, watts: float, busy_seconds: Callable[[], float]) -> None:
        self._watts, self._busy_seconds = watts, busy_seconds

    def joules(self) -> float:
        return self._watts * self._busy_seconds()

    def close(self) -> None:
        """There is nothing to close."""


def open_meter(meter: PowerMeter, files: Files, watts: float | None, busy_seconds: Callable[[], float]) -> Meter | None:
    """What the probe found, else the model where `watts` were declared; None where neither is there."""
    if meter.source == "powermetrics":
        return Powermetrics().start()
    if meter.source is not None and all(counter.unit == "energy" for counter in meter.counters):
        return Counted(meter.source, meter.counters, files)
    if meter.source is not None:
        return Sampled(meter.source, lambda: _sum_of_watts(meter.counters, files)).start()
    return None if watts is None else Modelled(watts, busy_seconds)


def _sum_of_watts(counters: tuple[PowerCounter, ...], files: Files) -> float | None:
    """None where one of them cannot be read: a part of the sum would be taken for all of it."""
    told = [files.number(counter.file) for counter in counters]
    return None if None in told else sum(microwatts for microwatts in told if microwatts is not None) * MICRO
