"""A table of the report, before anybody draws it: the console and the page show the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Standing = Literal["", "better", "worse"]
ALIKE = 0.05  # nearer to 1 than that is called neither better nor worse


@dataclass(frozen=True, slots=True)
class Cell:
    """`ratio` is to the first result, 1.00 there; empty where there is nothing to compare."""

    text: str
    ratio: str = ""
    standing: Standing = ""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong together, such as the results of one load. `name` may be empty."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`heads` are of the cells, without those of the groups' and rows' names, which stand in `stub`. `numeric`: cells are numbers."""

    title: str
    stub: tuple[str, str]
    heads: tuple[str, ...]
    groups: tuple[Group, ...]
    note: str = ""
    numeric: bool = True

    @property
    def is_grouped(self) -> bool:
        return any(group.name for group in self.groups)


def compared(value: float | None, first: float | None, more_is_better: bool | None) -> Cell:
    """A number beside that of the first result."""
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
    """Three figures: `1,234`, `56.7`, `0.0123`; what is counted as it is."""
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
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def plain(texts: Sequence[str]) -> tuple[Cell, ...]:
    return tuple(Cell(text or "–") for text in texts)
