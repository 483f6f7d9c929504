"""Schemathesis against all routes of a server, with all its checks: `make fuzz`, and in short a test.

`python -m tests.attack.api_fuzz 10000` sends so many requests to a model of each kind and prints a row for each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from app.api.application import ROUTES as ALL_ROUTES

COMMAND = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
# A schema says nothing about the kind of the served model, the length of its context, its labels and fields that exclude
# each other. Such a body is refused with 400, which is declared; `/` redirects. All else that the schema accepts must be accepted.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "307", "400", "401", "404", "408", "413", "429", "503", "504"]
"""
ROUTES = 62  # at least; each gets its share of the examples
SECONDS = 3_000


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """What schemathesis found. `failures` are the titles of the checks that failed, with their number."""

    cases: int
    failures: Counter[str]
    statuses: Counter[int]
    output: str

    @property
    def server_errors(self) -> int:
        return sum(number for status, number in self.statuses.items() if status >= 500 and status not in (503, 504))


def without_aliases(document: dict[str, Any]) -> dict[str, Any]:
    """The document with each operation at the first of its paths only."""
    seen: set[Any] = set()
    for route in ALL_ROUTES:
        if route.serve in seen:
            document["paths"].get(route.path, {}).pop(route.method.lower(), None)
        seen.add(route.serve)
    document["paths"] = {path: methods for path, methods in document["paths"].items() if methods}
    return document


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the responses called default: a status must be declared by its number."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("default", None)
    return document


def _command(url: str, examples: int, seed: int, headers: dict[str, str], coverage: bool) -> list[str]:
    """The command for schemathesis in a folder with the schema and the configuration."""
    phases = ["examples", *(["coverage"] if coverage else []), "fuzzing", "stateful"]
    command = [sys.executable, "-c", COMMAND, "--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url]
    command += ["--checks", "all", "--mode", "all", "--seed", str(seed), "--max-examples", str(examples)]
    command += ["--phases", ",".join(phases), "--no-shrink", "--continue-on-failure", "--request-timeout", "60"]
    command += ["--warnings", "off", "--suppress-health-check", "all"]
    command += ["--report", "json,har", "--report-json-path", "report.json", "--report-har-path", "report.har"]
    return [*command, *(each for header, value in headers.items() for each in ("-H", f"{header}: {value}"))]


def fuzz(
    url: str,
    examples: int,
    seed: int = 1,
    key: str = "",
    aliases: bool = True,
    coverage: bool = True,
    routes: re.Pattern[str] = re.compile(""),
) -> FuzzResult:
    """Send up to `examples` generated requests to each operation, besides the 18,000 of the fixed coverage phase.

    Without `aliases`, each operation gets them at one of its paths only. `routes`: only paths in which this is found.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    document = strict(httpx.get(f"{url}/openapi.json", headers=headers, timeout=60).json())
    document = document if aliases else without_aliases(document)
    document["paths"] = {path: item for path, item in document["paths"].items() if routes.search(path)}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "openapi.json").write_text(json.dumps(document))
        (folder / "schemathesis.toml").write_text(CONFIG)
        command = _command(url, examples, seed, headers, coverage)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        if not (folder / "report.json").exists():
            raise RuntimeError(f"schemathesis did not run: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        report = json.loads((folder / "report.json").read_text())
        entries = json.loads((folder / "report.har").read_text())["log"]["entries"]
    failures = Counter(str(each.get("title", each)) for each in report["failures"])
    failures.update(str(each) for each in report["errors"])
    return FuzzResult(
        cases=len(entries),
        failures=failures,
        statuses=Counter(entry["response"]["status"] for entry in entries),
        output=done.stdout + done.stderr,
    )


def main(cases: int) -> int:
    """Fuzz a model of each kind and print what was found; 1 if there was anything."""
    from tests.attack.kinds import KINDS, serving

    found = 0
    print("| model | requests | 500 | failed checks | statuses |\n|---|---|---|---|---|")
    for kind in KINDS:
        with TemporaryDirectory() as name, serving(kind, Path(name) / "model") as server:
            result = fuzz(server.url, max(1, cases // ROUTES))
            assert server.client.get("/healthz").status_code == 200
        number = sum(result.failures.values())
        found += number + result.server_errors
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(result.statuses.items()))
        print(f"| {kind} | {result.cases} | {result.server_errors} | {number} | {statuses} |", flush=True)
        if number:
            print(result.output, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
