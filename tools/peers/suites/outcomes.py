"""What every plugin does: leave out the tests that do not apply, write down the outcomes of the others."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tools.peers.suites.server_pool import ENVIRONMENT

TABLE = Path(__file__).with_name("not_applicable.toml")
MAX_REASON = 300


def pytest_configure(config: pytest.Config) -> None:
    """Write down the outcomes of our own tests, for which this module is the plugin."""
    config.pluginmanager.register(Outcomes("clients", Path(json.loads(os.environ[ENVIRONMENT])["outcomes"])))


class Outcomes:
    """A pytest plugin that writes one line of JSON per test to `file`.

    A line has `file`, `test`, `outcome` (passed, failed, not applicable) and `reason`. A test does not apply if the
    table names the beginning of its name or, after a star, a part of it; if its suite skips it; or if its error has one
    of the words in `signs`, which show that it uses a class of the peer and no server.
    """

    def __init__(self, suite: str, file: Path, *signs: str) -> None:
        self._file, self._signs = file, signs
        table = tomllib.loads(TABLE.read_text(encoding="utf-8")).get(suite, {})
        self._table: dict[str, dict[str, str]] = {} if json.loads(os.environ[ENVIRONMENT])["all"] else table

    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            reason = self._reason(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def _reason(self, item: pytest.Item) -> str | None:
        name = file_of(item.nodeid)
        table = self._table.get("*", {}) | self._table.get(name, {})
        return next((reason for pattern, reason in table.items() if _matches(item.name, pattern)), None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            where = report.longrepr
            self._write(report.nodeid, "not applicable", where[2] if isinstance(where, tuple) else str(where))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            if any(sign in said for sign in self._signs):
                self._write(report.nodeid, "not applicable", "uses a class of the peer, not a server")
            else:
                self._write(report.nodeid, "failed", said)
        elif report.when == "call":
            self._write(report.nodeid, "passed", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self._write(report.nodeid, "failed", "; ".join(lines) or str(report.longrepr))

    def _write(self, node: str, outcome: str, reason: str) -> None:
        line: dict[str, Any] = {
            "file": file_of(node),
            "test": node.partition("::")[2],
            "outcome": outcome,
            "reason": reason.removeprefix("Skipped: ")[:MAX_REASON],
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _matches(name: str, pattern: str) -> bool:
    return pattern[1:] in name if pattern.startswith("*") else name.startswith(pattern)


def file_of(node: str) -> str:
    return node.partition("::")[0]
