"""Time from start to readiness of a cold container and a bare process, in turns and with the same quota."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.peers.ports import free_port, is_answered
from tools.peers.quota import Quota
from tools.proofs.containers import POLL_SECONDS, Container, Image
from tools.proofs.findings import ROOT, Findings

MOST_LATER = 1.0  # seconds by which a container may be slower than the bare process
CORES = 2.0
ROUNDS = 5  # rounds that count; one before fills the page cache and the calibration cache
BARE_SECONDS = 120.0


def run(findings: Findings, image: Image, python: str = sys.executable) -> None:
    bare: list[float] = []
    container: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder) / name for name in ("bare", "container")}
        for cache in caches.values():
            cache.mkdir()
            cache.chmod(0o777)
        for number in range(ROUNDS + 1):
            found = _bare(python, caches["bare"]), _contained(image, caches["container"])
            if number:
                bare.append(found[0])
                container.append(found[1])
            print(f"start {number}: bare {found[0]:.2f} s, container {found[1]:.2f} s", file=sys.stderr, flush=True)
    judge(findings, bare, container)


def judge(findings: Findings, bare: Sequence[float], container: Sequence[float]) -> None:
    rows = [
        (name, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{max(times):.2f}")
        for name, times in (("bare process", bare), ("container", container))
    ]
    later = statistics.median(one - other for one, other in zip(container, bare, strict=True))
    findings.table(
        f"Seconds to ready, the demo, {CORES:g} cores, {len(bare)} starts each", ("", "median", "least", "most"), rows
    )
    what = "a container is ready within a second of the bare process"
    findings.check(what, later <= MOST_LATER, f"{later:.2f} s later", "<= 1 s")


def _contained(image: Image, cache: Path) -> float:
    port = free_port()
    options = (
        f"--cpus={CORES:g}", "--network=host", "--env=ARMATURE_HOST=127.0.0.1", f"--env=ARMATURE_PORT={port}",
        f"--volume={cache}:/var/cache/armature",
    )  # fmt: skip
    with Container(image, options, publish=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        return server.wait_until_ready()


def _bare(python: str, cache: Path) -> float:
    """Start the bare process in a control group with the container's quota."""
    port, quota = free_port(), Quota.make("bare", CORES)
    script = str(ROOT / "tools" / "peers" / "launch.py")
    launch = [sys.executable, "-I", "-S", script, "--procs", str(quota.procs), "--"]
    serve = [python, "-P", "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port), "--cache-dir", str(cache)]
    began = time.perf_counter()
    process = subprocess.Popen([*launch, *serve], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_answered(f"http://127.0.0.1:{port}/readyz"):
            if process.poll() is not None or time.perf_counter() - began > BARE_SECONDS:
                raise RuntimeError(f"the bare process is not ready after {time.perf_counter() - began:.0f} s")
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()
        quota.remove()
