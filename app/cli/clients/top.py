"""`armature top`: what a server does now, as a picture in a terminal that changes, or once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.cli.clients.connection import ServerRefused
from app.cli.clients.live_figures import CAUSES, LiveFigure, LiveFigures, SlowStepRow, format_count_of, format_seconds

FILE_WIDTH = 140  # columns of a picture in a file or a pipe
BARS = "▁▂▃▄▅▆▇█"
_LEAST_BARS = 8  # columns below which bars say nothing


def show_figures(figures: LiveFigures, interval: float, once: bool) -> int:
    """Show the figures until Ctrl-C, or once if it is asked for or there is no terminal; return the exit status.

    Raises:
        ServerRefused: The first reading failed.
    """
    console = Console(highlight=False)
    read = figures.read()
    if once or not console.is_terminal or console.is_dumb_terminal:
        (console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)).print(render(figures, read))
        return 0
    problem = ""
    try:
        with Live(render(figures, read), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    read, problem = figures.read(), ""
                except ServerRefused as error:  # it may come back
                    problem = error.message
                live.update(render(figures, read, problem), refresh=True)
    except KeyboardInterrupt:
        return 0


def render(figures: LiveFigures, read: Sequence[LiveFigure], problem: str = "") -> RenderableType:
    """Return the picture: a head, the figures, and the last slow steps."""
    parts: list[RenderableType] = [_head(figures), ""]
    if problem:
        parts += [Text(problem, style="bold red"), ""]
    return Group(*parts, _FigureTable(read), "", *_slow_steps(figures.slow))


def _head(figures: LiveFigures) -> Text:
    info, plan = figures.info, figures.info.get("plan") or {}
    device, precision = ((plan.get(name) or {}).get("value", "") for name in ("device", "precision"))
    how = f", a {figures.kind} on {device} in {precision}" if device else ""
    head = Text()
    head.append(str(info["model"]["name"]), style="bold")
    return head.append(f"{how} · Armature {info['version']} · {figures.server.url}")


@dataclass(frozen=True, slots=True)
class _FigureTable:
    """The figures in the width of the terminal: no value is cut, and bars are shown where they fit."""

    read: Sequence[LiveFigure]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with bars, without them, or with a name and its values in two lines."""
        plain = _grid(self.read, has_bars=False)
        room = options.max_width - Measurement.get(console, options.update(max_width=1000), plain).maximum
        if room >= 0:
            yield _grid(self.read, has_bars=room >= _LEAST_BARS)
        else:
            for figure in self.read:
                yield Text(figure.name, style="bold")
                yield Padding(Text(f"{figure.value}  {figure.detail}".rstrip()), (0, 0, 0, 2))


def _grid(read: Iterable[LiveFigure], has_bars: bool) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    if has_bars:
        table.add_column(style="cyan", no_wrap=True, overflow="crop")
    for figure in read:
        bars = [draw_line(figure.points)] if has_bars else []
        table.add_row(figure.name, figure.value, figure.detail, *bars)
    return table


def draw_line(points: Sequence[float]) -> str:
    """Return points as bars from zero to the highest one, the last at the right; empty for fewer than two."""
    most = max(points, default=0.0)
    if len(points) < 2 or most <= 0:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * max(point, 0.0) / most))] for point in points)


def _slow_steps(slow: Iterable[SlowStepRow]) -> list[RenderableType]:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("time", "took", "phase", "tokens", "cause"):
        table.add_column(
            heading, justify="right" if heading in ("took", "tokens") else "left", no_wrap=heading != "cause"
        )
    for step in slow:
        when = datetime.fromtimestamp(step.at).strftime("%H:%M:%S")
        cause = CAUSES.get(step.cause, step.cause)
        table.add_row(when, format_seconds(step.seconds), step.phase, format_count_of(step.tokens), cause)
    about = Text("Slow steps: over 1.5 times as long as expected, the last first", style="bold")
    return [about, table if table.row_count else Text("None so far.")]
