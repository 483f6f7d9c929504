"""A real Prometheus on a free loopback port that scrapes our servers every second and loads our rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tools.monitoring.plain_rules import plain_rules

LAUNCH = (sys.executable, "-P", str(Path(__file__).resolve().parents[2] / "tools" / "peers" / "launch.py"), "--")
START_SECONDS = 60.0


@contextmanager
def watching(program: str, folder: Path, pools: Mapping[str, str], plain: Sequence[str] = ()) -> Iterator[str]:
    """Run Prometheus until the block or this process ends, and yield its URL.

    `pools` are server URLs by pool, labelled as our PodMonitor labels pods with the objective turn-taking. `plain` are
    servers without labels except job and instance. All data is in `folder`.
    """
    configuration, log = folder / "prometheus.yml", folder / "prometheus.log"
    configuration.write_text(json.dumps(_configuration(_rules(folder), pools, plain)))
    flags = (
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
    )
    with log.open("w") as said:
        process = subprocess.Popen([*LAUNCH, program, *flags], stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield "http://" + _address(process, log)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _configuration(rules: Path, pools: Mapping[str, str], plain: Sequence[str]) -> dict[str, Any]:
    pods = [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {
                "pool": pool,
                "objective": "turn-taking",
                "namespace": "armature",
                "pod": f"armature-{pool}-0",
                "instance": f"armature-{pool}-0",
            },
        }
        for pool, url in pools.items()
    ]
    others = [{"targets": [url.removeprefix("http://")]} for url in plain]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": name, "static_configs": targets}
            for name, targets in (("armature", pods), ("plain", others))
            if targets
        ],
    }


def _rules(folder: Path) -> Path:
    """Write our rules with an evaluation interval of one second."""
    rules = folder / "rules.yml"
    groups = yaml.safe_load(plain_rules())["groups"]
    rules.write_text(json.dumps({"groups": [{**group, "interval": "1s"} for group in groups]}))
    return rules


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"Prometheus does not listen: {log.read_text()[-300:]}")
