"""A Prometheus on loopback that scrapes two busy servers, a decoder as pool amd64 and an encoder as pool arm64.

It loads the rules that a cluster would load.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from external_tools import ROOT, tool
from loopback_prometheus import watching
from tools.monitoring.demo_load import busy
from tools.peers.quota import Quota

PATIENCE = 180.0  # seconds for each thing to come; a busy machine is no failure
SCRAPES = 4  # while servers are busy: two within any window of a query, even where this machine is too busy for some
LISTENING = re.compile(r"listening on (http://\S+)")
LAUNCH = (sys.executable, "-P", str(ROOT / "tools" / "peers" / "launch.py"))
# Tests run where others compute too, and there nothing measured would be believed: without that there is no capacity to show.
SERVE = """
import sys
from app.cli.main import main
from armature_kernels import timing
from app.server import prepare
assert hasattr(prepare, "SMALL_BUDGET_SECONDS") and hasattr(timing, "MAX_SPREAD") and hasattr(timing, "MAX_ADJUSTMENT")
prepare.SMALL_BUDGET_SECONDS, timing.MAX_SPREAD, timing.MAX_ADJUSTMENT = 10.0, 1e9, 1e9
sys.exit(main(sys.argv[1:]))
"""
POOLS = {
    "amd64": ("--hourly-price", "0.04", "--watts", "12"),
    "arm64": ("--hourly-price", "0.03", "--watts", "7", "--model", "bert"),
}


@dataclass(frozen=True, slots=True)
class LivePrometheus:
    """`servers` are ours, by pool; `at` is when they were still busy, seconds since 1970; `has_quota`: one of them runs under one."""

    url: str
    servers: dict[str, str]
    at: float
    has_quota: bool
    client: httpx.Client

    def query(self, promql: str) -> list[dict[str, Any]]:
        """An instant vector as it was then: of each series `metric` and `value`."""
        return asked(self.client, self.url, promql, self.at)


def asked(client: httpx.Client, url: str, promql: str, at: float | None = None) -> list[dict[str, Any]]:
    told = client.get(f"{url}/api/v1/query", params={"query": promql, **({} if at is None else {"time": at})}).json()
    assert told["status"] == "success", (promql, told)
    found: list[dict[str, Any]] = told["data"]["result"]
    return found


def until(condition: Callable[[], bool]) -> None:
    """Looks seldom: what is waited for takes seconds, and computes on the same cores."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what had to come did not"
        time.sleep(0.1)


@contextmanager
def live_prometheus(folder: Path) -> Iterator[LivePrometheus]:
    """Servers and Prometheus end with it, and with the process that runs the tests."""
    program = tool("prometheus")
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=30))
        quota = _quota(stack)
        starts = {pool: stack.enter_context(_server(folder, pool, quota if pool == "amd64" else ())) for pool in POOLS}
        servers = {pool: url() for pool, url in starts.items()}
        for server in servers.values():
            until(partial(_answers, client, f"{server}/readyz"))
        url = stack.enter_context(watching(program, folder, servers, plain=[servers["amd64"]]))
        until(partial(_answers, client, f"{url}/-/ready"))
        targets = len(servers) + 1
        until(lambda: len(asked(client, url, "up == 1")) == targets)  # who saw a counter before sees its first increase
        with busy(servers):
            until(lambda: _watched(client, url, targets))
            at = time.time()
        yield LivePrometheus(url, servers, at, bool(quota), client)


def _watched(client: httpx.Client, url: str, targets: int) -> bool:
    """Each was seen often enough while its requests ended, and just now; what repeats itself was guessed, and the rules have run."""
    often = f"count_over_time((sum by (instance) (rate(armature_request_seconds_count[4s])) > 0)[1m:1s]) >= {SCRAPES}"
    guessed = 'armature_speculation_tokens_total{kind="drafted"} > 0 and on () pool:armature_slo_burn:rate3d'
    return len(asked(client, url, f"{often} and on (instance) up == 1")) == targets and bool(
        asked(client, url, guessed)
    )


def _quota(stack: ExitStack) -> list[Path]:
    """The lists to join for a quota of one core; none for who may not make control groups."""
    with suppress(SystemExit):
        quota = Quota.make("dashboards", 1.0)
        stack.callback(quota.remove)
        return [quota.procs]
    return []


@contextmanager
def _server(folder: Path, pool: str, groups: Sequence[Path]) -> Iterator[Callable[[], str]]:
    """Yields a function that waits for the server's URL; it fails at once, with the server's log, where the server ended."""
    joined = [word for group in groups for word in ("--procs", str(group))]
    serve = ("serve", "--port", "0", "--threads", "1", "--calibrate", "auto", "--cache-dir", str(folder / "cache"))
    log = folder / f"{pool}.log"
    with log.open("w") as said:
        command = [*LAUNCH, *joined, "--", sys.executable, "-c", SERVE, *serve, *POOLS[pool]]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT)
    try:
        yield partial(_url, log, process)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(log: Path, process: subprocess.Popen[bytes]) -> str:
    until(lambda: LISTENING.search(log.read_text()) is not None or process.poll() is not None)
    found = LISTENING.search(log.read_text())
    assert found is not None, f"the server ended with {process.poll()}:\n{log.read_text()}"
    return found[1]


def _answers(client: httpx.Client, url: str) -> bool:
    with suppress(httpx.TransportError):
        return client.get(url).status_code == 200
    return False
