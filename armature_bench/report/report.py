"""Report on several result files: tables on the console, and an HTML page with plots if a folder is given.

The console shows caveats first, then the headline sentences, then the tables.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from armature_bench.compare.result import read_result
from armature_bench.console import MeasurementFailed
from armature_bench.report.comparison import ReportContent, build_report_content
from armature_bench.report.page import PageSection, Plot, ReportPage, render_page
from armature_bench.report.tables import ReportOrigin, ReportTable, ResultNotes, TableCell, check_comparable


def make_report(paths: Sequence[Path], folder: Path | None, force: bool, here: ReportOrigin) -> int:
    """Make the report and return the exit status.

    Raises `MeasurementFailed` if a file cannot be read or written, results cannot be compared, or matplotlib is
    missing.
    """
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise MeasurementFailed(
            "--report needs matplotlib, which is not installed: pip install 'armature-serve[bench]', or make report."
        )
    results = [read_result(path) for path in paths]
    check_comparable(results, force)
    comparison = build_report_content(results, here)
    written = (
        None if folder is None else write_report(comparison, folder)
    )  # first: the reader of the tables may close the pipe
    print_report(comparison.notes, comparison.sentences, comparison.tables)
    if written is not None:
        sys.stderr.write(f"{written} ({written.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def write_report(comparison: ReportContent, folder: Path) -> Path:
    """Write the page and each plot as a PNG file into `folder`. Only this needs matplotlib."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = page_sections(comparison)
        for plot in (plot for section in sections for plot in section.plots):
            (folder / f"{plot.name}.png").write_bytes(plot.png)
        page = ReportPage(comparison.title, comparison.notes, comparison.sentences, sections, comparison.colophon)
        (folder / PAGE).write_text(render_page(page), encoding="utf-8")
    except OSError as error:
        raise MeasurementFailed(f"the report cannot be written to {folder}: {error}.") from error
    return folder / PAGE


_VERDICT_STYLES = {"": "", "better": "green", "worse": "yellow"}

DEFAULT_WIDTH = 140  # if standard output is not a terminal


def print_report(judged: Sequence[ResultNotes], sentences: Sequence[str], tables: Sequence[ReportTable]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=DEFAULT_WIDTH)
    console.print(Group(*_note_lines(judged), *(Text(sentence, "bold") for sentence in sentences)), soft_wrap=True)
    for table in tables:
        console.print()
        console.print(to_rich_table(table))
        if table.note:
            console.print(Text(table.note, "dim"))


def _note_lines(judged: Sequence[ResultNotes]) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{each.name}: caveat: {doubt}", "yellow") for each in judged for doubt in each.doubts
    ]
    return lines + [Text(f"{each.name}: {remark}", "dim") for each in judged for remark in each.remarks]


def to_rich_table(table: ReportTable) -> RichTable:
    """Return the table as a rich table. A group's name appears only in its first row."""
    made = RichTable(
        title=table.title, title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    if table.is_grouped:
        made.add_column(table.row_headings[0], no_wrap=True)
    made.add_column(table.row_headings[1], no_wrap=True)
    for head in table.heads:
        made.add_column(head, justify="right" if table.numeric else "left", overflow="fold")
    for group in table.groups:
        for index, row in enumerate(group.rows):
            stub = [Text(group.name if index == 0 else "")] if table.is_grouped else []
            made.add_row(*stub, Text(row.name), *(_cell(cell) for cell in row.cells))
    return made


def _cell(cell: TableCell) -> Text:
    text = Text(cell.text)
    return text.append(f" {cell.ratio}", _VERDICT_STYLES[cell.verdict]) if cell.ratio else text


PAGE = "report.html"


def page_sections(comparison: ReportContent) -> list[PageSection]:
    """Return the sections, from the headline to the details. A section without content is left out."""
    from armature_bench.report.plots import latency_plot, throughput_plots
    from armature_bench.report.timelines import roofline_plot, timeline_plot

    cases, names, results = comparison.cases, comparison.names, comparison.results
    figures = {table.title: table for table in comparison.metric_tables}
    throughput, tokens, energy, circumstances = (figures.get(title) for title in comparison.group_titles)
    found = [
        PageSection("What was compared", tables=(comparison.overview,)),
        _section("Throughput", throughput_plots(cases, names), [throughput]),
        _section("Latency", [latency_plot(cases, names)], [tokens]),
        _section("Jitter", [timeline_plot(cases, names)], comparison.step_tables),
        _section("Ceilings", [roofline_plot(results, names)], []),
        _section("Energy and cost", [], [energy]),
        _section("Decisions", [], [comparison.decisions]),
        _section("Circumstances", [], [circumstances]),
    ]
    return [section for section in found if section.plots or section.tables or section.sentences]


def _section(title: str, plots: Sequence[Plot | str], tables: Sequence[ReportTable | None]) -> PageSection:
    drawn = tuple(plot for plot in plots if isinstance(plot, Plot))
    reasons = tuple(plot for plot in plots if isinstance(plot, str))
    return PageSection(title, drawn, tuple(table for table in tables if table is not None), reasons)
