"""A report's page: one self-contained HTML file without scripts and network access, light or dark.

This module and the template `page.html` do without matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from armature_bench.report.tables import ReportTable, ResultNotes


@dataclass(frozen=True, slots=True)
class Plot:
    """A finished plot. `svg` is part of the page; `alternative` is the alt text.

    `png` is written next to the page; it is empty for a plot that is on the page alone.
    """

    name: str
    title: str
    caption: str
    alternative: str
    svg: str
    png: bytes = b""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page. `sentences` say why something is missing."""

    title: str
    plots: tuple[Plot, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A page: caveats and remarks, the headline sentences, the sections, and where it all comes from."""

    title: str
    notes: Sequence[ResultNotes]
    sentences: Sequence[str]
    sections: Sequence[PageSection]
    colophon: Sequence[str]


def render_page(page: ReportPage) -> str:
    """Render the page as HTML. All text is escaped, except the plots."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=page.title,
        judged=page.notes,
        sentences=page.sentences,
        sections=page.sections,
        colophon=page.colophon,
    )
