"""Console output of the benches: progress bar and table on standard error, one JSON object on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from app.bench.stats import Figure, Outcome

WIDTH = 140
WIDEST = 1000
LOOKS_PER_SECOND = 2  # each refresh takes a millisecond from what is measured
STEADY_SECONDS = 600.0  # averaging period of the speed, so that the time left does not jump with every load
PERCENTILES = ("p90", "p95")  # columns between p50 and p99


class Advance(Protocol):
    """Callback that reports progress."""

    def __call__(self, text: str, units: float = 1, /) -> None:
        """Report `units` of completed work; `text` describes the current work."""


@contextmanager
def progress(total: int, what: str) -> Iterator[Advance]:
    """Show a progress bar with the remaining time. Shows nothing if standard error is not a terminal."""
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not shown,
        refresh_per_second=LOOKS_PER_SECOND,
        speed_estimate_period=STEADY_SECONDS,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text, units=1: bar.update(task, advance=units, description=text)


def show(outcome: Outcome, json_path: Path | None) -> int:
    """Print the outcome, write it to `json_path` if given, and return the exit status.

    The exit status is 1 for a failed measurement and 130 after Ctrl-C.
    """
    console = _console()
    figures = table(outcome)
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), figures).maximum
    Console(stderr=True, width=max(needed, console.width)).print(figures)  # lines wrap on a narrow terminal; no figure is cut off
    for note in outcome.notes:
        console.print(note, markup=False, highlight=False)
    for mistake in outcome.mistakes:
        console.print(mistake, style="bold red", markup=False, highlight=False)
    if not outcome.complete:
        console.print("Interrupted: these are the samples taken until then.", style="yellow")
    text = json.dumps(outcome.to_json())
    if json_path is not None:
        json_path.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    if outcome.mistakes:
        return 1
    return 0 if outcome.complete else 130  # 128 + SIGINT: ends a loop in a shell too


def table(outcome: Outcome) -> Table:
    """Build the table: one row per figure, and a column for every value that at least one figure has."""
    rows = [_cells(figure) for figure in outcome.figures]
    parts = dict.fromkeys(name for figure in outcome.figures for name in figure.parts)
    percentiles, others = [name for name in parts if name in PERCENTILES], [name for name in parts if name not in PERCENTILES]
    names = ("", "p50", *percentiles, "p99", "unit", *others, "ratio", "target", "against")
    used = [name for name in names if any(row.get(name) for row in rows)]
    made = Table(
        title=f"armature bench {outcome.bench}: {outcome.subject}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for name in used:
        made.add_column(name, no_wrap=True, justify="left" if name in ("", "unit", "against") else "right")
    for row in rows:
        made.add_row(*(row.get(name, "") for name in used))
    return made


def _cells(figure: Figure) -> dict[str, str]:
    """Return the cells of one row by column name."""
    return {
        "": figure.name,
        "p50": number(figure.value),
        **{name: number(value) for name, value in figure.parts.items()},
        "p99": "" if figure.p99 is None else number(figure.p99),
        "unit": figure.unit,
        "ratio": "" if figure.ratio is None else f"{figure.ratio:.3f}",
        "target": _target(figure),
        "against": figure.against,
    }


def _console() -> Console:
    """Return a console on standard error; outside a terminal, such as in a log, it is `WIDTH` columns wide."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=WIDTH)


def number(value: float) -> str:
    """Format with three significant digits; numbers from 1000 on have thousands separators and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    colour = "green" if figure.met else "red"
    return f"[{colour}]{'≤' if figure.at_most else '≥'} {figure.target:g}[/{colour}]"
