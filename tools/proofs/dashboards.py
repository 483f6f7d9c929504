"""The dashboards over containers: a Prometheus scrapes two of them under load.

Every panel's query must return data.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import httpx

from tools.monitoring.check_dashboards import DASHBOARDS, Prometheus, Window, check, queries
from tools.monitoring.demo_load import busy
from tools.monitoring.loopback_prometheus import watching
from tools.proofs.containers import Container, Image
from tools.proofs.findings import Findings

PROGRAM_PLACES = "/usr/bin:/usr/local/bin:/usr/sbin"
LOAD_SECONDS = 60.0
RATE_SECONDS = 15  # for $__rate_interval; the scrape interval is one second
# Labels as in a mixed cluster. One server has a quota of a whole core, so that the throttling panels have data.
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
        with watching(program, Path(folder), servers) as url:
            with busy(servers):
                time.sleep(LOAD_SECONDS)  # the panels show rates over this load
            _checked(findings, url)


def _checked(findings: Findings, url: str) -> None:
    now = time.time()
    window = Window(now - LOAD_SECONDS, now, RATE_SECONDS)
    empty: list[str] = []
    for file in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(file.read_text())
        with httpx.Client(base_url=url, timeout=30) as client:
            faults, excused = check(Prometheus(client), dashboard, window)
        found = f"{len(list(queries(dashboard)))} queries, {len(excused)} empty with a reason" + "".join(
            f"; {one}" for one in faults
        )
        findings.check(
            f"{dashboard['title']}: every panel shows something", not faults, found, "nothing empty without a reason"
        )
        empty += [f"- {sentence}" for sentence in excused]
    if empty:
        findings.notes.append("\n".join(["Empty with a reason:\n", *empty]))
