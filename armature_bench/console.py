"""Results of a bench (statistics, figures with targets, checks for failed measurements) and their output.

A progress bar and a table go to standard error, one JSON object to standard output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

PRODUCT_RATE = "product rate"
# Where our own product is the fastest, its ceiling is a sample of the same product, and both vary by 1 to 2%.
HIGHEST_PRODUCT_SHARE = 1.03


class MeasurementFailed(Exception):
    """Raised when a bench cannot measure what was requested; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of the samples of one quantity.

    Percentiles are nearest-rank, so p99 of ten samples is the largest.
    """

    p50: float
    p99: float
    smallest: float
    largest: float
    num_samples: int


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that is at least as large as `share` (0 to 1) of all samples."""
    assert samples, "a percentile needs samples"
    assert 0.0 < share <= 1.0, "a share must be in (0, 1]"
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def compute_spread(samples: Sequence[float]) -> Spread:
    return Spread(
        p50=statistics.median(samples),
        p99=percentile(samples, 0.99),
        smallest=min(samples),
        largest=max(samples),
        num_samples=len(samples),
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the result table.

    `ratio` compares the value with something that `against` names. `parts` are further numbers, one column each.
    `target` is a limit of the ratio if there is one, else of the value: a lower limit unless `at_most` is True. With
    `is_share`, the ratio is a fraction of a ceiling, and outside 0 to 1 the measurement has failed. `digits` are the
    significant digits that are printed.
    """

    name: str
    value: float
    unit: str
    p99: float | None = None
    ratio: float | None = None
    against: str = ""
    target: float | None = None
    at_most: bool = False
    is_share: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    digits: int = 3

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None if there is no target."""
        if self.target is None:
            return None
        compared = self.value if self.ratio is None else self.ratio
        return compared <= self.target if self.at_most else compared >= self.target

    @property
    def mistake(self) -> str | None:
        """Reason why this figure cannot be correct, or None."""
        highest = HIGHEST_PRODUCT_SHARE if self.against == PRODUCT_RATE else 1.0
        if self.is_share and self.ratio is not None and not 0.0 <= self.ratio <= highest:
            return f"{self.name}: {self.ratio:.2f} of {self.against} is impossible: a failed measurement"
        return None


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """All results of one bench command.

    `complete` is False after an interruption; `notes` are sentences printed below the table. `value_name` is the
    heading of the figures' values. `picture` is printed below the notes, and is not part of the JSON object.
    """

    bench: str
    subject: str
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    notes: tuple[str, ...] = ()
    value_name: str = "p50"
    picture: RenderableType | None = None

    @property
    def mistakes(self) -> list[str]:
        return [figure.mistake for figure in self.figures if figure.mistake is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the command prints and writes."""
        figures = [dataclasses.asdict(figure) | {"met": figure.met} for figure in self.figures]
        return {
            "bench": self.bench,
            "subject": self.subject,
            "complete": self.complete,
            "mistakes": self.mistakes,
            "notes": list(self.notes),
            "figures": figures,
            "details": self.details,
        }


LOG_WIDTH = 140
MAX_WIDTH = 1000
REFRESHES_PER_SECOND = 2  # each refresh takes a millisecond from what is measured
STEADY_SECONDS = 600.0  # averaging period of the speed, so that the time left does not jump with every load
PERCENTILES = ("p90", "p95")  # columns between p50 and p99


class AdvanceProgress(Protocol):
    def __call__(self, text: str, units: float = 1, /) -> None:
        """Report `units` of completed work; `text` describes the current work."""


@contextmanager
def progress(total: int, what: str) -> Iterator[AdvanceProgress]:
    """Show a progress bar with the remaining time. Shows nothing if standard error is not a terminal."""
    console = _console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not shown,
        refresh_per_second=REFRESHES_PER_SECOND,
        speed_estimate_period=STEADY_SECONDS,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text, units=1: bar.update(task, advance=units, description=text)


def print_outcome(outcome: BenchOutcome, json_path: Path | None) -> int:
    """Print the outcome, write it to `json_path` if given, and return the exit status.

    The exit status is 1 for a failed measurement and 130 after Ctrl-C.
    """
    console = _console()
    figures = outcome_table(outcome)
    needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), figures).maximum
    Console(stderr=True, width=max(needed, console.width)).print(
        figures
    )  # lines wrap on a narrow terminal; no figure is cut off
    for note in outcome.notes:
        console.print(note, markup=False, highlight=False)
    if outcome.picture is not None:
        console.print(outcome.picture)
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


def outcome_table(outcome: BenchOutcome) -> Table:
    """Build the table: one row per figure, and a column for every value that at least one figure has."""
    rows = [_cells(figure) for figure in outcome.figures]
    parts = dict.fromkeys(name for figure in outcome.figures for name in figure.parts)
    percentiles, others = (
        [name for name in parts if name in PERCENTILES],
        [name for name in parts if name not in PERCENTILES],
    )
    names = ("", "p50", *percentiles, "p99", "unit", *others, "ratio", "target", "against")
    used = [name for name in names if any(row.get(name) for row in rows)]
    result = Table(
        title=f"armature bench {outcome.bench}: {outcome.subject}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for name in used:
        heading = outcome.value_name if name == "p50" else name
        result.add_column(heading, no_wrap=True, justify="left" if name in ("", "unit", "against") else "right")
    for row in rows:
        result.add_row(*(row.get(name, "") for name in used))
    return result


def _cells(figure: Figure) -> dict[str, str]:
    return {
        "": figure.name,
        "p50": format_number(figure.value, figure.digits),
        **{name: format_number(value, figure.digits) for name, value in figure.parts.items()},
        "p99": "" if figure.p99 is None else format_number(figure.p99),
        "unit": figure.unit,
        "ratio": "" if figure.ratio is None else f"{figure.ratio:.3f}",
        "target": _target(figure),
        "against": figure.against,
    }


def _console() -> Console:
    """Return a console on standard error; outside a terminal, such as in a log, it is `WIDTH` columns wide."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=LOG_WIDTH)


def format_number(value: float, digits: int = 3) -> str:
    """Format with this many significant digits; numbers from 1000 on have thousands separators and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    colour = "green" if figure.met else "red"
    return f"[{colour}]{'≤' if figure.at_most else '≥'} {figure.target:g}[/{colour}]"
