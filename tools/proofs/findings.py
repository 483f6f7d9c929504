"""The findings of one part: checks that passed or failed, tables and notes, which can be stored as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


class TooLong(RuntimeError):
    """A part exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `found` and `wanted` are texts that fit into a table cell."""

    name: str
    passed: bool
    found: str
    wanted: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class Findings:
    """The findings of one part. Something that could not be tried is a sentence in `skipped`, never a passed check."""

    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    began: str = ""
    seconds: float = 0.0
    machine: str = ""

    def check(self, name: str, passed: bool, found: object, wanted: object = "") -> bool:
        self.checks.append(Check(name, bool(passed), _line(found), _line(wanted)))
        progress(f"{'passed' if passed else 'FAILED'}: {name}: {_line(found)}")
        return bool(passed)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.tables.append(Table(title, tuple(columns), tuple(tuple(map(_line, row)) for row in rows)))

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Findings:
        tables = [
            Table(each["title"], tuple(each["columns"]), tuple(tuple(row) for row in each["rows"]))
            for each in value["tables"]
        ]
        plain = {name: value[name] for name in ("notes", "skipped", "began", "seconds", "machine") if name in value}
        return cls(checks=[Check(**each) for each in value["checks"]], tables=tables, **plain)


def progress(text: str) -> None:
    """Say on standard error what was found, or what is done now: a part takes many minutes."""
    print(f"prove: {text}", file=sys.stderr, flush=True)


def _line(value: object) -> str:
    return " ".join(str(value).split())
