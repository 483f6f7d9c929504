"""The report on a console: caveats first, then the headline sentences, then the tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table as Drawn
from rich.text import Text

from app.bench.report.judging import Judged
from app.bench.report.table import Cell, Table

_STANDING = {"": "", "better": "green", "worse": "yellow"}
WIDTH = 140  # if standard output is not a terminal


def print_report(judged: Sequence[Judged], sentences: Sequence[str], tables: Sequence[Table]) -> None:
    """Print the report to standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(Group(*_doubts(judged), *(Text(sentence, "bold") for sentence in sentences)), soft_wrap=True)
    for table in tables:
        console.print()
        console.print(drawn(table))
        if table.note:
            console.print(Text(table.note, "dim"))


def _doubts(judged: Sequence[Judged]) -> list[RenderableType]:
    told: list[RenderableType] = [Text(f"{each.name}: caveat: {doubt}", "yellow") for each in judged for doubt in each.doubts]
    return told + [Text(f"{each.name}: {remark}", "dim") for each in judged for remark in each.remarks]


def drawn(table: Table) -> Drawn:
    """Return the table as a rich table. A group's name appears only in its first row."""
    made = Drawn(title=table.title, title_justify="left", title_style="bold", header_style="bold", box=None, padding=(0, 2, 0, 0))
    if table.is_grouped:
        made.add_column(table.stub[0], no_wrap=True)
    made.add_column(table.stub[1], no_wrap=True)
    for head in table.heads:
        made.add_column(head, justify="right" if table.numeric else "left", overflow="fold")
    for group in table.groups:
        for index, row in enumerate(group.rows):
            stub = [Text(group.name if index == 0 else "")] if table.is_grouped else []
            made.add_row(*stub, Text(row.name), *(_cell(cell) for cell in row.cells))
    return made


def _cell(cell: Cell) -> Text:
    text = Text(cell.text)
    return text.append(f" {cell.ratio}", _STANDING[cell.standing]) if cell.ratio else text
