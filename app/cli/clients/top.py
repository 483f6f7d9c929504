"""What a server does now, read from `/metrics`, `/info` and `/info/steps`: the figures of the web page's tab Now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.cli.clients.connection import ServerConnection, ServerRefused
from app.hardware.decision import format_bytes
from app.metrics.instruments import MetricSamples, parse_samples

MAX_POINTS = 60
MAX_SLOW_STEPS = 10
MAX_STEPS_BEHIND = 4000  # steps before the first reading that are read too
STEPS_OF_A_RESPONSE = 2048
PAST_END = 10**17  # a step number that no server reaches: the response is empty and says which number comes next
CAUSES = {
    "prefill": "a prompt was read in the same step",
    "page_fault": "memory was touched for the first time",
    "garbage_collection": "Python collected garbage",
    "throttled": "the quota of CPU time was used up",
    "compiled": "a step of a new shape was recorded",
    "preempted": "a sequence had to give up its memory",
    "thermal": "heat slowed the processor down",
    "frequency": "the processor ran at a low frequency",
    "descheduled": "other programs took the cores",
    "unknown": "unknown",
}

FILE_WIDTH = 140  # columns of a picture in a file or a pipe
BARS = "▁▂▃▄▅▆▇█"
_LEAST_BARS = 8  # columns below which bars say nothing


@dataclass(frozen=True, slots=True)
class LiveFigure:
    """One line: its name, its value and a detail as text, and the points of its line over time, if it has one."""

    name: str
    value: str
    detail: str = ""
    points: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SlowStepRow:
    """A step that took over 1.5 times as long as expected; `at` is in Unix seconds."""

    at: float
    seconds: float
    phase: str
    tokens: int
    cause: str


@dataclass(slots=True)
class LiveFigures:
    """Reads one server again and again. `info` is the server's `/info`; `query` names one of several models there."""

    server: ServerConnection
    info: dict[str, Any]
    query: str = ""
    slow: deque[SlowStepRow] = field(default_factory=lambda: deque(maxlen=MAX_SLOW_STEPS))
    _points: dict[str, deque[float]] = field(default_factory=dict)
    _before: tuple[float, dict[str, float]] | None = None
    _next_step: int | None = None

    @property
    def kind(self) -> str:
        return str(self.info["model"]["kind"])

    def _path(self, path: str) -> str:
        return f"{path}{'&' if '?' in path else '?'}{self.query}" if self.query else path

    def read(self) -> list[LiveFigure]:
        """Return the figures of this moment, and set `slow`. Raises `ServerRefused`."""
        self._read_steps()
        samples = parse_samples(self.server.get_text(self._path("/metrics")))
        rates = self._rates(samples)
        decodes = self.kind == "decoder"
        return [
            *(self._decoder_figures(samples, rates) if decodes else self._batch_figures(samples, rates)),
            *self._load_figures(samples, rates),
            *_machine_figures(samples, decodes),
        ]

    def _rates(self, samples: MetricSamples) -> dict[str, float | None]:
        """Return units per second since the reading before; in the first one, the server's own of the last minute."""
        now = time.monotonic()
        totals = {
            "completion_tokens": samples.value("tokens_total", kind="completion") or 0.0,
            "prompt_tokens": samples.value("tokens_total", kind="prompt") or 0.0,
            "vectors": samples.value("vectors_total") or 0.0,
            "requests": samples.value("requests_total") or 0.0,
        }
        before, self._before = self._before, (now, totals)
        if before is None or any(totals[name] < before[1][name] for name in totals):  # the server was started again
            return {name: samples.value("throughput_per_second", kind=name) for name in totals}
        return {name: (total - before[1][name]) / (now - before[0]) for name, total in totals.items()}

    def _with_points(self, name: str, value: float | None, text: str, detail: str) -> LiveFigure:
        points = self._points.setdefault(name, deque(maxlen=MAX_POINTS))
        points.append(value or 0.0)
        return LiveFigure(name, text, detail, tuple(points))

    def _decoder_figures(self, samples: MetricSamples, rates: dict[str, float | None]) -> list[LiveFigure]:
        written, gap = rates["completion_tokens"], _quantile(samples, "itl", "0.5")
        found = [
            self._with_points(
                "tokens a second",
                written,
                format_count_of(written),
                f"prompts {format_count_of(rates['prompt_tokens'])}",
            ),
            _latency(samples, "first token, p50", "ttft"),
            self._with_points(
                "gap between tokens, p50",
                gap,
                format_seconds(gap),
                _tail(samples, "itl"),
            ),
        ]
        used = samples.value("kv_cache_usage_ratio")
        if used is not None:
            total = (self.info.get("capacity") or {}).get("kv_capacity_tokens")
            detail = f"of {format_count_of(total)} tokens" if total else ""
            found.append(self._with_points("context memory in use", used, f"{used:.0%}", detail))
        return found

    def _batch_figures(self, samples: MetricSamples, rates: dict[str, float | None]) -> list[LiveFigure]:
        vectors = rates["vectors"]
        name = "rows a second" if self.kind == "program" else "texts a second"
        return [
            self._with_points(
                name, vectors, format_count_of(vectors), f"tokens {format_count_of(rates['prompt_tokens'])}"
            ),
            _latency(samples, "time of a request, p50", "request"),
            _latency(samples, "waiting before it, p50", "queue"),
        ]

    def _load_figures(self, samples: MetricSamples, rates: dict[str, float | None]) -> list[LiveFigure]:
        running, waiting = samples.value("requests_running"), samples.value("requests_waiting")
        wait = samples.value("predicted_wait_seconds")
        return [
            self._with_points(
                "requests", running, f"{format_count_of(running)} running", f"{format_count_of(waiting)} waiting"
            ),
            LiveFigure(
                "requests a second",
                format_count_of(rates["requests"]),
                "" if wait is None else f"a new one waits {format_seconds(wait)}",
            ),
        ]

    def _read_steps(self) -> None:
        if self._next_step is None:
            following = int(self.server.get_json(self._path(f"/info/steps?after={PAST_END}"))["next"])
            self._next_step = max(0, following - MAX_STEPS_BEHIND)
        for _ in range(1 + MAX_STEPS_BEHIND // STEPS_OF_A_RESPONSE):
            found = self.server.get_json(self._path(f"/info/steps?after={self._next_step}"))
            steps, self._next_step = found["steps"], int(found["next"])
            rows = zip(steps["at"], steps["seconds"], steps["phase"], steps["tokens"], steps["cause"], strict=True)
            self.slow.extendleft(SlowStepRow(*row) for row in rows if row[-1])
            if len(steps["at"]) < STEPS_OF_A_RESPONSE:
                return


def open_figures(server: ServerConnection, model: str | None = None) -> LiveFigures:
    """Return the reader of a server's figures, of one of its models. Raises `ServerRefused`, also if it is no Armature."""
    try:
        server.get_json(f"/info/steps?after={PAST_END}")  # a wrong key is refused here, where /info only says less
    except ServerRefused as error:
        if error.status != 404:
            raise
        raise ServerRefused(f"{server.url} is no Armature: it has no /info/steps.", 404) from error
    info = server.get_json("/info" if model is None else f"/info?{urlencode({'model': model})}")
    several = [one["name"] for one in info.get("models", ())]
    if model is not None and not any(model in one["names"] for one in info.get("models", ())):
        raise ServerRefused(
            f"{server.url} has no model {model!r}; it has {', '.join(several) or info['model']['name']}."
        )
    if "model" not in info or "version" not in info:
        raise ServerRefused(f"{server.url} is not ready: {info.get('stage', 'it says nothing')}.")
    return LiveFigures(server, info, urlencode({"model": info["model"]["name"]}) if several else "")


def _machine_figures(samples: MetricSamples, decodes: bool) -> list[LiveFigure]:
    unit = "token" if decodes else "vector"
    memory, watts = samples.value("process_resident_memory_bytes"), samples.value("power_watts")
    dollars, drafted = samples.value("cost_dollars_total"), samples.value("speculation_tokens_total", kind="drafted")
    found = [] if memory is None else [LiveFigure("memory of the process", format_bytes(int(memory)))]
    if watts is not None:
        joules = samples.value(f"energy_joules_per_{unit}")
        found.append(
            LiveFigure("power", f"{format_count_of(watts)} W", "" if joules is None else f"{joules:.3g} J a {unit}")
        )
    if dollars is not None:
        million = samples.value("llm_cost_per_million_tokens" if decodes else "cost_per_million_vectors")
        detail = "" if million is None else f"{million:.3g} per million {unit}s"
        found.append(LiveFigure("dollars since the start", f"{dollars:.3g}", detail))
    if drafted:
        accepted = samples.value("speculation_tokens_total", kind="accepted") or 0.0
        found.append(
            LiveFigure("drafted tokens accepted", f"{accepted / drafted:.0%}", f"of {format_count_of(drafted)}")
        )
    return found


def _quantile(samples: MetricSamples, metric: str, quantile: str) -> float | None:
    return samples.value("latency_quantile_seconds", metric=metric, quantile=quantile)


def _latency(samples: MetricSamples, name: str, metric: str) -> LiveFigure:
    return LiveFigure(
        name,
        format_seconds(_quantile(samples, metric, "0.5")),
        _tail(samples, metric),
    )


def _tail(samples: MetricSamples, metric: str) -> str:
    return ", ".join(
        f"{name} {format_seconds(_quantile(samples, metric, quantile))}"
        for name, quantile in (("p95", "0.95"), ("p99", "0.99"))
    )


def format_count_of(value: float | None) -> str:
    """Format with three significant digits, or all of a whole part; a dash if it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_seconds(value: float | None) -> str:
    """Format a duration in the unit in which it is easiest to read; a dash if it is not known."""
    if value is None:
        return "–"
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        if value * factor < 1000 or unit == "s":
            return f"{value * factor:.3g} {unit}" if value < 120 else f"{value / 60:,.0f} min"
    raise AssertionError("seconds are the last unit")


def show_figures(figures: LiveFigures, interval: float, once: bool) -> int:
    """Show the figures until Ctrl-C, or once; return the exit status. Raises `ServerRefused` at the first reading."""
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
