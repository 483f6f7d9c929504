"""Tables of the report, independent of how they are rendered: the console and the page show the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Standing = Literal["", "better", "worse"]
ALIKE = 0.05  # a ratio closer to 1 than this is neither better nor worse


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. `ratio` is relative to the first result, which has 1.00; empty if there is nothing to compare."""

    text: str
    ratio: str = ""
    standing: Standing = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A named row of cells."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong together, such as the results of one load. `name` may be empty."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    `row_headings` are the headings of the columns with the groups' and rows' names, `heads` those of the cells.
    `numeric`: cells are numbers.
    """

    title: str
    stub: tuple[str, str]
    heads: tuple[str, ...]
    groups: tuple[Group, ...]
    note: str = ""
    numeric: bool = True

    @property
    def is_grouped(self) -> bool:
        """True if any group has a name."""
        return any(group.name for group in self.groups)


def compared(value: float | None, first: float | None, more_is_better: bool | None) -> Cell:
    """Return the cell of a number, with its ratio to that of the first result."""
    if value is None:
        return Cell("–")
    if not first or more_is_better is None:
        return Cell(number(value))
    ratio = value / first
    standing: Standing = ""
    if abs(ratio - 1) >= ALIKE:
        standing = "better" if (ratio > 1) == more_is_better else "worse"
    return Cell(number(value), times(ratio), standing)


def number(value: float) -> str:
    """Format a number with three significant digits: `1,234`, `56.7`, `0.0123`. Integers are shown in full."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, min(9, digits))}f}"


def times(ratio: float) -> str:
    """Format a ratio, such as `1.25×`."""
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def plain(texts: Sequence[str]) -> tuple[Cell, ...]:
    """Return cells of text without comparison; a dash for an empty text."""
    return tuple(Cell(text or "–") for text in texts)
