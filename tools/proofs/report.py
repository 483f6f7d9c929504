"""The report of the proofs: what was tried, where and when, and the result.

It is written from stored findings alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.proofs.findings import Check, Findings, Table

HEAD = """# Proofs

This page is for people who need evidence of what the image does. `make prove` writes it; do not edit it. Each
promise was checked on real containers; a failed check is named as failed. Each section has its own date and machine,
because a part can be run alone (`make prove ARGS="--only quota"`). *Emulated* figures prove instructions and numbers,
never speed.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One part: its title, a description of one or two sentences, and its findings; None if it has not run."""

    title: str
    about: str
    findings: Findings | None


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
    yield f"{findings.began}, {findings.seconds:.0f} s{f', on {findings.machine}' if findings.machine else ''}.\n"
    if findings.checks:
        yield from _rows(("check", "", "found", "wanted"), [_cells(check) for check in findings.checks])
        yield ""
    for table in findings.tables:
        yield from _table(table)
    for note in findings.notes:
        yield f"{note}\n"
    for skipped in findings.skipped:
        yield f"*Not tried:* {skipped}\n"


def _cells(check: Check) -> tuple[str, ...]:
    return check.name, "yes" if check.passed else "**failed**", check.found, check.wanted


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.title}**\n"
    yield from _rows(table.columns, table.rows)
    yield ""


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
