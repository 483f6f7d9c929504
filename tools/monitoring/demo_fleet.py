"""Draw the dashboards of healthy servers under load: `python -m tools.monitoring.demo_fleet --into docs/dashboards`.

It starts three servers with the demo models, a Prometheus that scrapes them every second, and clients that no server
refuses. Prices and watts are declared, and the names of the pools too: all three are processes on this machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from armature_bench.console import progress
from tools.monitoring.check_dashboards import Prometheus, Window
from tools.monitoring.demo_load import steady
from tools.monitoring.draw_dashboards import draw
from tools.monitoring.loopback_prometheus import LAUNCH, watching

POOLS = {
    "amd64": ("--hourly-price", "0.1785", "--watts", "32"),
    "arm64": ("--hourly-price", "0.145", "--watts", "14"),
    "vectors": ("--hourly-price", "0.0725", "--watts", "7", "--model", "bert"),
}
START_SECONDS = 90.0
RATE_SECONDS = 15


def main(words: Sequence[str] | None = None) -> int:
    """Draw the pictures after `--seconds` of load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder for a PNG of each dashboard")
    parser.add_argument("--seconds", type=int, default=120, help="how long the servers are under load")
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program; default: from PATH")
    arguments = parser.parse_args(words)
    if arguments.prometheus is None:
        print("There is no `prometheus` in PATH: install it (Debian's package of that name).", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Small models are measured only briefly at a start. The pools share the machine, and so what was measured.
        for pool in ("amd64", "vectors"):
            flags = [*serving_flags(folder), *POOLS[pool][4:]]
            subprocess.run([sys.executable, "-P", "-m", "app", "calibrate", *flags], check=True, capture_output=True)
        servers = {pool: stack.enter_context(_server(folder, pool)) for pool in POOLS}
        url = stack.enter_context(watching(arguments.prometheus, folder, servers))
        with steady(servers["amd64"], servers["arm64"], servers["vectors"]):
            _wait(arguments.seconds)
            end = time.time()
        window = Window(end - arguments.seconds + RATE_SECONDS, end, RATE_SECONDS)
        with httpx.Client(base_url=url, timeout=30) as client:
            draw(Prometheus(client), window, arguments.into)
    return 0


def _wait(seconds: int) -> None:
    with progress(seconds, "load") as advance:
        for _ in range(seconds):
            time.sleep(1)
            advance("load", 1)


def serving_flags(folder: Path) -> tuple[str, ...]:
    """Return the flags that all servers share."""
    return ("--threads", "1", "--cache-dir", str(folder / "cache"))


@contextmanager
def _server(folder: Path, pool: str) -> Iterator[str]:
    """Run a server until the block ends and yield its URL once it is ready."""
    log = folder / f"{pool}.log"
    serve = ("serve", "--port", "0", *serving_flags(folder), *POOLS[pool])
    with log.open("w") as said:
        command = [*LAUNCH, sys.executable, "-P", "-m", "app", *serve]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        listening = re.compile(r"listening on (http://\S+)")
        _until(lambda: bool(listening.search(log.read_text())) or process.poll() is not None)
        found = listening.search(log.read_text())
        if found is None:
            raise SystemExit(f"the server of {pool} ended with {process.poll()}: {log.read_text()[-500:]}")
        url = found[1]
        _until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        yield url
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a server was not ready after {START_SECONDS:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
