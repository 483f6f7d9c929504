"""The findings of the proofs: checks that passed or failed, tables and notes; stored as JSON, and the report of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OLDER = "Older than the code that it names: run `make prove` for it again."


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
    code: str = ""  # digest of the part's code when it ran

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
        plain = {
            name: value[name] for name in ("notes", "skipped", "began", "seconds", "machine", "code") if name in value
        }
        return cls(checks=[Check(**each) for each in value["checks"]], tables=tables, **plain)


def code_digest(paths: Sequence[str]) -> str:
    """Return a digest of files and of all files in folders; empty if there are none."""
    files = sorted(file for path in paths for file in (ROOT / path, *(ROOT / path).rglob("*")) if file.is_file())
    sources = [file.read_bytes() for file in files if "__pycache__" not in file.parts]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12] if sources else ""


def progress(text: str) -> None:
    """Say on standard error what was found, or what is done now: a part takes many minutes."""
    print(f"prove: {text}", file=sys.stderr, flush=True)


def _line(value: object) -> str:
    return " ".join(str(value).split())


HEAD = """# Proofs

This page is for people who need evidence of what the image does. `make prove` writes it; do not edit it. Each
promise was checked on real containers; a failed check is named as failed. Each section has its own date and machine,
because a part can be run alone (`make prove ARGS="--only quota"`). *Emulated* figures prove instructions and numbers,
never speed.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One part: its title, a description of one or two sentences, its findings (None if it has not run), its code."""

    title: str
    about: str
    findings: Findings | None
    code: Sequence[str] = ()


def page(facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    return "\n".join(
        [HEAD, *_verdict(sections), "", *_facts(facts), *(line for each in sections for line in _section(each))]
    )


def _verdict(sections: Sequence[Section]) -> Iterator[str]:
    checks = [check for each in sections if each.findings for check in each.findings.checks]
    failed = [check for check in checks if not check.passed]
    missing = [each.title for each in sections if each.findings is None]
    yield f"**{len(checks) - len(failed)} of {len(checks)} checks passed.**" + (
        f" Failed: {len(failed)}." if failed else ""
    )
    for check in failed:
        yield f"- **failed**: {check.name}: {check.found}" + (f" (wanted: {check.wanted})" if check.wanted else "")
    if missing:
        yield f"\nNot run: {', '.join(missing)}."


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    yield from _rows(("what", "is"), list(facts.items()))
    yield ""


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.about}\n"
    findings = section.findings
    if findings is None:
        yield "Not run.\n"
        return
    on = "".join(
        (f", on {findings.machine}" if findings.machine else "", f", code `{findings.code}`" * bool(findings.code))
    )
    older = f" {OLDER}" if findings.code != code_digest(section.code) else ""
    yield f"{findings.began}, {findings.seconds:.0f} s{on}.{older}\n"
    if findings.checks:
        cells = [
            (each.name, "yes" if each.passed else "**failed**", each.found, each.wanted) for each in findings.checks
        ]
        yield from _rows(("check", "", "found", "wanted"), cells)
        yield ""
    for table in findings.tables:
        yield from _table(table)
    for note in findings.notes:
        yield f"{note}\n"
    for skipped in findings.skipped:
        yield f"*Not tried:* {skipped}\n"


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.title}**\n"
    yield from _rows(table.columns, table.rows)
    yield ""


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
