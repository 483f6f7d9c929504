"""A real Prometheus on loopback that has watched two busy servers of ours: the demo that generates, as pool amd64, and the one that
makes vectors, as pool arm64. What it loads of rules is what a cluster would be given.
"""

from __future__ import annotations

import json
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
import yaml

from outside_tools import ROOT, tool
from tests.deploy.demo_load import busy
from tools.peers.quota import Quota
from tools.plain_rules import plain_rules

PATIENCE = 180.0  # seconds for each thing to come; a busy machine is no failure
SCRAPES = 6  # while servers are busy: two within any window of a query, even where this machine is too busy for some
LAUNCH = (sys.executable, "-P", str(ROOT / "tools" / "peers" / "launch.py"))
# Tests run where others compute too, and there nothing measured would be believed: without that there is no capacity to show.
SERVE = """
import sys
from app import cli, preparation
from app.kernels import calibrate
preparation.SMALL_BUDGET_SECONDS, calibrate.MOST_SPREAD, calibrate.MOST_BENT = 10.0, 1e9, 1e9
sys.exit(cli.main(sys.argv[1:]))
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
        starts = {pool: stack.enter_context(_server(folder, pool, quota if pool == "amd64" else None)) for pool in POOLS}
        servers = {pool: _url(said, r"listening on (http://\S+)") for pool, said in starts.items()}
        for server in servers.values():
            until(partial(_answers, client, f"{server}/readyz"))
        url = stack.enter_context(_prometheus(program, folder, servers))
        until(partial(_answers, client, f"{url}/-/ready"))
        until(
            lambda: len(asked(client, url, "up == 1")) == len(servers) + 1
        )  # a counter's first increase is seen by who saw it before
        with busy(servers):
            until(lambda: _watched(client, url, servers))
            at = time.time()
        yield LivePrometheus(url, servers, at, quota is not None, client)


def _watched(client: httpx.Client, url: str, servers: dict[str, str]) -> bool:
    """Each server was seen often enough while it worked, and just now; what repeats itself was guessed, and the rules have run."""
    often = f'count_over_time(rate(armature_requests_total{{job="armature"}}[4s])[1m:1s]) >= {SCRAPES} and on (instance) up == 1'
    guessed = 'armature_speculation_tokens_total{kind="drafted"} > 0 and on () pool:armature_slo_burn:rate3d'
    return {each["metric"]["pool"] for each in asked(client, url, often)} == set(servers) and bool(asked(client, url, guessed))


def _quota(stack: ExitStack) -> list[Path] | None:
    """The lists to join for a quota of one core; None for who may not make control groups."""
    with suppress(SystemExit):
        quota = Quota.make("dashboards", 1.0)
        stack.callback(quota.remove)
        return [quota.procs]
    return None


@contextmanager
def _server(folder: Path, pool: str, groups: Sequence[Path] | None) -> Iterator[Path]:
    joined = [word for group in groups or () for word in ("--procs", str(group))]
    serve = ("serve", "--port", "0", "--threads", "1", "--calibrate", "auto", "--cache-dir", str(folder / "cache"))
    command = [*LAUNCH, *joined, "--", sys.executable, "-c", SERVE, *serve, *POOLS[pool]]
    with _running(command, folder / f"{pool}.log") as said:
        yield said


@contextmanager
def _prometheus(program: str, folder: Path, servers: dict[str, str]) -> Iterator[str]:
    configuration = folder / "prometheus.yml"
    configuration.write_text(yaml.safe_dump(_configuration(folder, servers)))
    files = (f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'tsdb'}", "--web.listen-address=127.0.0.1:0")
    with _running([*LAUNCH, "--", program, *files], folder / "prometheus.log") as said:
        url = "http://" + _url(said, r'msg="Listening on" address=(\S+)')
        yield url


def _answers(client: httpx.Client, url: str) -> bool:
    with suppress(httpx.TransportError):
        return client.get(url).status_code == 200
    return False


def _configuration(folder: Path, servers: dict[str, str]) -> dict[str, Any]:
    """Labels as our PodMonitor gives them; and, as job plain, the first server as a plain list of targets has it: without a pool."""
    addresses = {pool: url.removeprefix("http://") for pool, url in servers.items()}
    pods = [
        {
            "targets": [address],
            "labels": {"pool": pool, "namespace": "armature", "pod": f"armature-{pool}-0", "instance": f"armature-{pool}-0"},
        }
        for pool, address in addresses.items()
    ]
    plain = [{"targets": [addresses["amd64"]]}]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules) for rules in _rules(folder)],
        "scrape_configs": [
            {"job_name": name, "static_configs": targets} for name, targets in (("armature", pods), ("plain", plain))
        ],
    }


def _rules(folder: Path) -> list[Path]:
    """Our rules, each group looked at every second."""
    plain = folder / "rules.yml"
    groups = yaml.safe_load(plain_rules())["groups"]
    plain.write_text(json.dumps({"groups": [{**group, "interval": "1s"} for group in groups]}))
    return [plain]


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[Path]:
    """Ended by its own signal, then for good; what it says is in the file."""
    with log.open("w") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT)
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(said: Path, pattern: str) -> str:
    """What the log says of where it listens."""
    until(lambda: re.search(pattern, said.read_text()) is not None)
    found = re.search(pattern, said.read_text())
    assert found is not None
    return found[1]
