"""Measure a first start and the next one: `python -m tools.measure.first_start --model DIR [serve's flags ...]`.

Both starts share a cache folder that is empty at first, so the first start calibrates and packs, and the next one finds
everything. Each prints the seconds of every phase, as `/readyz` names them, and the peak of resident memory: all of it
(VmHWM, which counts mapped pages that the system may reclaim) and the anonymous part. The page cache is not emptied.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 0.05
FIRST_TARGET, NEXT_TARGET = 40.0, 4.0  # seconds to readiness of a model with 1.2 billion parameters on two cores
MEMORY_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile")
MIB = 2**20


@dataclass(slots=True)
class Start:
    """What was observed of one start: seconds by phase in their order, and memory in bytes."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_anonymous_bytes: int = 0
    slowest_answer_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def main() -> int:
    """Run both starts. Progress goes to stderr; stdout has a table and, in the last line, JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--timeout", type=float, default=1800.0, help="longest wait for readiness, in seconds")
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        starts = [measure(arguments.model, Path(folder), flags, arguments.timeout) for _ in ("first", "next")]
        packs = sum(file.stat().st_size for file in Path(folder).rglob("*.pack"))
    for name, start, target in zip(("first", "next"), starts, (FIRST_TARGET, NEXT_TARGET), strict=True):
        report(name, start, target, packs)
    print(json.dumps({"packed_bytes": packs, "starts": [start.to_json() for start in starts]}))
    return 0


def measure(model: str, cache: Path, flags: list[str], timeout_seconds: float) -> Start:
    """Start a server, watch it until it is ready, and stop it.

    Raises:
        SystemExit: It ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "app", "serve", "--model", model, "--cache-dir", str(cache), "--port", "0", *flags]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        return _watch(process, began, timeout_seconds)
    finally:
        process.terminate()
        process.wait(30)


def _watch(process: subprocess.Popen[str], began: float, timeout_seconds: float) -> Start:
    found, phase, since = Start(), "opening the port", began
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("listening on ").strip()
    while True:
        asked = time.monotonic()
        body = _readiness(url) if process.poll() is None else None
        now = time.monotonic()
        if body is None or now - began > timeout_seconds:
            raise SystemExit(f"The server was not ready: {phase}.")
        found.slowest_answer_seconds = max(found.slowest_answer_seconds, now - asked)
        _observe_memory(process.pid, found)
        current = body.get("progress", {}).get("phase") or body.get("stage", "").split(",")[0]
        if body["status"] == "ready" or current != phase:
            found.phases[phase] = found.phases.get(phase, 0.0) + now - since
            phase, since = current, now
        if body["status"] == "ready":
            found.seconds = now - began
            return found
        time.sleep(INTERVAL_SECONDS)


def _readiness(url: str) -> dict[str, Any] | None:
    """Return the body of `/readyz`, whatever its status; None if there is no answer."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=30) as response:
            body: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        body = json.load(error)
    except OSError:
        return None
    return body


def _observe_memory(pid: int, found: Start) -> None:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name in MEMORY_FIELDS
    }
    found.peak_bytes = max(found.peak_bytes, values["VmHWM"])
    found.peak_anonymous_bytes = max(found.peak_anonymous_bytes, values["RssAnon"])
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    found.cpu_seconds = (int(user) + int(system)) / 100


def report(name: str, start: Start, target: float, packed_bytes: int) -> None:
    """Print one start as a table."""
    print(
        f"{name} start: ready in {start.seconds:.1f} s ({start.cpu_seconds:.1f} s of processor time), target {target:.0f} s"
    )
    for phase, seconds in start.phases.items():
        print(f"  {phase:40} {seconds:8.1f} s")
    over = (start.peak_anonymous_bytes - packed_bytes) / MIB
    print(
        f"  peak of resident memory {start.peak_bytes / MIB:,.0f} MiB, anonymous {start.peak_anonymous_bytes / MIB:,.0f} MiB"
    )
    print(f"  anonymous over the {packed_bytes / MIB:,.0f} MiB of packed weights: {over:,.0f} MiB")
    print(f"  slowest answer of /readyz meanwhile: {start.slowest_answer_seconds * 1e3:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
