"""Mixed traffic against one server process for a long time: `make soak`, and for a minute in `make test-all`.

`python -m tests.attack.soak 3600` prints a row for each tenth of the time and ends with 1 if memory or descriptors grew
by more than 5% after the first part, or more than two threads were started. Clients answer,
leave in the middle, read slowly, and send bad bodies.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.hardware.facts import ThermalSensors
from app.hardware.probe.host_files import HostFiles
from app.hardware.probe.probe import probe, run_command
from app.hardware.thermal_sensors import ThermalReading, read_thermal

MAX_GROWTH = 0.05
WARM_UP = 0.3  # part of the time; of an hour the first minutes would do
MAX_WARM_UP_SECONDS = 300.0
CLIENTS = 8
SLOW_BYTES, SLOW_SECONDS = 256, 0.05
BAD_BODIES = (
    b"", b"{", b"[]", b"null", b'{"prompt": 3}', b'{"no": 1}', b"[" * 50_000, b'{"messages": []}', b"\xff\xfe", b'{"prompt": ""}',
    b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "temperature": 1e999}', b'{"messages": [{"role": "x", "content": 1}]}',
)  # fmt: skip
# The pools start a thread when so many large bodies or texts come together for the first time, which is rare here.
MAX_STARTED_THREADS = 2
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds: resident bytes, and the number of descriptors and threads; and the processor's state."""

    seconds: float
    resident_bytes: int
    descriptors: int
    threads: int
    thermal: ThermalReading = field(default_factory=ThermalReading)


def usage_of(pid: int, began: float) -> Usage:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) * 1024
    descriptors, threads = len(list((process / "fd").iterdir())), int(status["Threads"])
    return Usage(time.monotonic() - began, resident, descriptors, threads, read_here())


@cache
def sensors() -> ThermalSensors:
    """What this machine lets read of its frequency and temperature."""
    return probe().thermal


def read_here() -> ThermalReading:
    """The processor's frequency and temperature now."""
    return read_thermal(sensors(), HostFiles(Path("/")), run_command)


def thermal_lines(samples: list[Usage]) -> list[str]:
    """The least and the median frequency, the median and the highest temperature, and how often heat slowed a core."""
    hertz = [sample.thermal.hertz for sample in samples if sample.thermal.hertz is not None]
    celsius = [sample.thermal.celsius for sample in samples if sample.thermal.celsius is not None]
    throttles = [sample.thermal.throttles for sample in samples if sample.thermal.throttles is not None]
    limited = [sample.thermal.is_limited for sample in samples if sample.thermal.is_limited is not None]
    found = []
    if hertz:
        found.append(f"frequency: least {min(hertz) / 1e9:.2f} GHz, median {statistics.median(hertz) / 1e9:.2f} GHz")
    if celsius:
        found.append(f"temperature: median {statistics.median(celsius):.0f} °C, highest {max(celsius):.0f} °C")
    if throttles:
        found.append(f"heat slowed a core down {throttles[-1] - throttles[0]} times")
    if limited:
        found.append(f"heat limited the frequency in {sum(limited)} of {len(limited)} samples")
    return found or ["frequency and temperature: no source on this machine"]


class Traffic:
    """Clients that send until they are stopped. `outcomes` counts statuses and the names of what was done on purpose."""

    def __init__(self, url: str, seed: int = 1) -> None:
        self._address = url.removeprefix("http://")
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + n),)) for n in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request was never answered"

    def _run(self, dice: random.Random) -> None:
        kinds: list[Callable[[random.Random], str]] = [
            self._answered,
            self._answered,
            self._chat,
            self._bad,
            self._leaves,
            self._slow,
        ]
        while not self._stopped.is_set():
            outcome = dice.choice(kinds)(dice)
            with self._lock:
                self.outcomes[outcome] += 1

    def _post(self, path: str, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        connection.request("POST", path, body, JSON)
        return connection, connection.getresponse()

    def _ask(self, path: str, body: bytes) -> str:
        connection, response = self._post(path, body)
        response.read()
        connection.close()
        return str(response.status)

    def _answered(self, dice: random.Random) -> str:
        text = "".join(dice.choices("abcdefghij ", k=dice.randint(1, 100)))
        return self._ask("/generate", json.dumps({"prompt": text, "max_tokens": dice.randint(1, 20)}).encode())

    def _chat(self, dice: random.Random) -> str:
        messages = [{"role": "user", "content": "a" * dice.randint(1, 100)}]
        return self._ask("/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 4}).encode())

    def _bad(self, dice: random.Random) -> str:
        return self._ask(dice.choice(["/generate", "/v1/chat/completions", "/nowhere"]), dice.choice(BAD_BODIES))

    def _stream(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        return self._post("/generate", b'{"prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": true}')

    def _leaves(self, dice: random.Random) -> str:
        connection, response = self._stream()
        response.read(dice.randint(1, 200))
        response.close()
        connection.close()
        return "left"

    def _slow(self, dice: random.Random) -> str:
        connection, response = self._stream()
        while response.read(SLOW_BYTES) and not self._stopped.wait(SLOW_SECONDS):
            pass
        response.close()
        connection.close()
        return "slow"


def soak(url: str, pid: int, seconds: float, every: float) -> tuple[list[Usage], Counter[str]]:
    """Send traffic for so long; return the usage from the end of the warm-up on, each at rest or under the same load."""
    began = time.monotonic()
    traffic = Traffic(url)
    traffic.start()
    samples = []
    waiting = threading.Event()
    while (now := time.monotonic() - began) < seconds:
        waiting.wait(min(every, seconds - now))
        samples.append(usage_of(pid, began))
    traffic.stop()
    assert httpx.get(f"{url}/healthz").status_code == 200
    warm = min(WARM_UP * seconds, MAX_WARM_UP_SECONDS)
    return [sample for sample in samples if sample.seconds >= warm], traffic.outcomes


def growth(values: list[int]) -> float:
    """By how much the median of the last third is above the highest of the first.

    What leaks is there in most samples; what a single sample meets, such as a process that is being started, is not.
    """
    third = max(len(values) // 3, 1)
    return statistics.median(values[-third:]) / max(values[:third]) - 1


def faults(samples: list[Usage], outcomes: Counter[str]) -> list[str]:
    """What grew, and statuses that no client should have got, in sentences."""
    found = []
    for name, slack in (("resident_bytes", 0), ("descriptors", CLIENTS)):
        values = [getattr(sample, name) + slack for sample in samples]
        if growth(values) > MAX_GROWTH:
            found.append(f"{name} grew by {100 * growth(values):.1f}%")
    started = max(sample.threads for sample in samples) - samples[0].threads
    if started > MAX_STARTED_THREADS:
        found.append(f"{started} threads were started")
    wrong = [status for status in outcomes if status not in ("200", "400", "404", "429", "left", "slow")]
    return found + [f"{outcomes[status]} answers were {status}" for status in wrong]


def main(seconds: float) -> int:
    """Soak a server for so long and print what it held."""
    from tests.live.live_server import server_process, until
    from tiny_checkpoints import write_checkpoint

    with TemporaryDirectory() as name:
        model = write_checkpoint(Path(name) / "tiny")
        with server_process(model, "--calibrate", "off", "--log-level", "error") as process:
            url = process.url()
            until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            samples, outcomes = soak(url, process.process.pid, seconds, every=max(seconds / 200, 1.0))
    print("| seconds | resident MB | descriptors | threads |\n|---|---|---|---|")
    for sample in samples[:: max(len(samples) // 10, 1)]:
        print(f"| {sample.seconds:.0f} | {sample.resident_bytes / 1e6:.1f} | {sample.descriptors} | {sample.threads} |")
    print("; ".join(thermal_lines(samples)))
    print(", ".join(f"{name}: {number}" for name, number in sorted(outcomes.items())))
    found = faults(samples, outcomes)
    print("; ".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 3_600.0))
