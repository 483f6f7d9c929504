"""The report as one self-contained HTML page: no network access, no scripts, no other files.

It is light or dark as the reader's browser prefers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.bench.report.comparison import Comparison
from app.bench.report.concurrency import throughput_plots
from app.bench.report.distribution import latency_plot
from app.bench.report.rhythm import rhythm_plot
from app.bench.report.roofline import roofline_plot
from app.bench.report.style import Plot
from app.bench.report.table import Table


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page. `sentences` say why something is missing."""

    title: str
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    sentences: tuple[str, ...] = ()


def sections_of(comparison: Comparison) -> list[Section]:
    """Return the sections, from the headline to the details. A section without content is left out."""
    cases, names, results = comparison.cases, comparison.names, comparison.results
    figures = {table.title: table for table in comparison.figures}
    throughput, tokens, energy, circumstances = (figures.get(title) for title in comparison.topics)
    found = [
        Section("What was compared", tables=(comparison.head,)),
        _section("Throughput", throughput_plots(cases, names), [throughput]),
        _section("Latency", [latency_plot(cases, names)], [tokens]),
        _section("Jitter", [rhythm_plot(cases, names)], comparison.tails),
        _section("Ceilings", [roofline_plot(results, names)], []),
        _section("Energy and cost", [], [energy]),
        _section("Decisions", [], [comparison.decisions]),
        _section("Circumstances", [], [circumstances]),
    ]
    return [section for section in found if section.plots or section.tables or section.sentences]


def render(comparison: Comparison, sections: Sequence[Section]) -> str:
    """Render the page as HTML. All text from result files is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=comparison.title,
        judged=comparison.judged,
        sentences=comparison.sentences,
        sections=sections,
        colophon=comparison.colophon,
    )


def _section(title: str, plots: Sequence[Plot | str], tables: Sequence[Table | None]) -> Section:
    drawn = tuple(plot for plot in plots if isinstance(plot, Plot))
    reasons = tuple(plot for plot in plots if isinstance(plot, str))
    return Section(title, drawn, tuple(table for table in tables if table is not None), reasons)
