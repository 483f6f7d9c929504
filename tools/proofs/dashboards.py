"""The dashboards over containers: a Prometheus scrapes two of them under load, and every panel's query must show something."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.deploy.demo_load import busy
from tools.check_dashboards import DASHBOARDS, Prometheus, Window, check, queries
from tools.plain_rules import plain_rules
from tools.proofs.containers import Container, Image
from tools.proofs.findings import Findings

PROGRAM_PLACES = "/usr/bin:/usr/local/bin:/usr/sbin"
LOAD_SECONDS = 60.0
RATE_SECONDS = 15  # for $__rate_interval; it is scraped every second
START_SECONDS = 30.0
# As pools of a mixed cluster are told apart. One quota of a whole core: what throttling shows is there.
POOLS = {
    "amd64": ("--hourly-price", "0.04", "--watts", "12"),
    "arm64": ("--hourly-price", "0.03", "--watts", "7", "--model", "bert"),
}


def run(findings: Findings, image: Image) -> None:
    program = shutil.which("prometheus") or shutil.which("prometheus", path=PROGRAM_PLACES)
    if program is None:
        findings.skipped.append("every panel's query: there is no `prometheus` here (Debian's package of that name).")
        return
    with (
        Container(image, ("--cpus=1", "--memory=4g"), POOLS["amd64"]) as decoder,
        Container(image, ("--cpus=1", "--memory=4g"), POOLS["arm64"]) as encoder,
        tempfile.TemporaryDirectory() as folder,
    ):
        servers = {"amd64": decoder.url, "arm64": encoder.url}
        for each in (decoder, encoder):
            each.wait_until_ready()
        with _prometheus(program, Path(folder), servers) as url:
            with busy(servers):
                time.sleep(LOAD_SECONDS)  # the load itself: what is shown are rates over it
            _checked(findings, url)


def _checked(findings: Findings, url: str) -> None:
    now = time.time()
    window = Window(now - LOAD_SECONDS, now, RATE_SECONDS)
    for file in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(file.read_text())
        faults, excused = check(Prometheus(url), dashboard, window)
        found = f"{len(list(queries(dashboard)))} queries, {len(excused)} empty with a reason" + "".join(
            f"; {one}" for one in faults
        )
        findings.check(f"{dashboard['title']}: every panel shows something", not faults, found, "nothing empty without a reason")
        findings.notes += [f"- {sentence}" for sentence in excused]


@contextmanager
def _prometheus(program: str, folder: Path, servers: Mapping[str, str]) -> Iterator[str]:
    """On a free port of loopback, with our rules, each looked at every second."""
    configuration, log = folder / "prometheus.yml", folder / "log"
    configuration.write_text(json.dumps(_configuration(folder, servers)))
    words = (f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'tsdb'}", "--web.listen-address=127.0.0.1:0")
    with log.open("w") as said:
        process = subprocess.Popen([program, *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield "http://" + _address(process, log)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _configuration(folder: Path, servers: Mapping[str, str]) -> dict[str, object]:
    rules = folder / "rules.yml"
    groups = yaml.safe_load(plain_rules())["groups"]
    rules.write_text(json.dumps({"groups": [{**group, "interval": "1s"} for group in groups]}))
    static = [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {"pool": pool, "namespace": "armature", "pod": f"armature-{pool}-0", "instance": f"armature-{pool}-0"},
        }
        for pool, url in servers.items()
    ]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "armature", "static_configs": static}],
    }


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"Prometheus does not listen: {log.read_text()[-300:]}")
