"""The choices made for one model on this machine, with reasons: the output of `armature probe --model`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from app.hardware.decision import Measurements, Trial, count, gib
from app.hardware.facts import Facts, Needs, plain
from app.hardware.plan import ServingPlan
from app.hardware.trials import rate
from app.preparation import Prepared, looked_up
from app.report import apple_gpu, gpu, processor, value_of
from app.settings import Settings
from app.weights.opening import open_model

# Decisions that matter for this model, in the order in which they are made; `--json` has all of them.
_TOLD = (
    "device", "cuda_device",
    "precision", "int8_copy", "kv_precision", "kernels", "threads", "wait_policy", "max_batch_tokens", "batch_target_tokens",
    "itl_target_seconds", "compile", "speculation", "weight_bytes", "kv_cache_bytes", "max_model_len", "max_running_seqs",
)  # fmt: skip
_GENERATING = (
    "kv_precision",
    "itl_target_seconds",
    "speculation",
    "kv_cache_bytes",
)  # not shown for a model that does not generate
_MOST_COLUMNS = 6  # per phase in the table of speeds: the number that fits into 120 columns with the names
_MOST_TRIALS = 6


@dataclass(frozen=True, slots=True)
class Phase:
    """A kind of step: the heading of its first column, that of the others, and its table of step times."""

    first: str
    other: str
    read: Callable[[Trial], Mapping[int, float]]

    def columns(self, shown: Sequence[Trial]) -> Iterator[tuple[str, int]]:
        """Yield the headings and sizes of the columns."""
        for index, size in enumerate(_columns([self.read(trial) for trial in shown])):
            yield (self.other if index else self.first).format(size), size


PHASES = (
    Phase("decode ×{}", "×{}", lambda trial: trial.decode_seconds),
    Phase("prompt of {}", "{}", lambda trial: trial.prefill_seconds),
    Phase("texts of {}", "{}", lambda trial: trial.encode_seconds),
)
_ROWS = Phase("steps of {}", "{}", lambda trial: trial.encode_seconds)  # steps of an exported program


@dataclass(frozen=True, slots=True)
class Explained:
    """A plan for a model, and everything it was made from. `origin`: when it was measured, or how it can be."""

    name: str
    facts: Facts
    needs: Needs
    plan: ServingPlan
    measurements: Measurements | None
    origin: str

    def to_json(self) -> dict[str, Any]:
        """Return facts, needs, measurements and plan as JSON-serializable values."""
        parts = {"facts": self.facts, "needs": self.needs, "measurements": self.measurements}
        return {**{name: plain(part) for name, part in parts.items()}, "plan": self.plan.to_json()}


def explain(settings: Settings, facts: Facts) -> Explained:
    """Return the plan that a start would make, with cached measurements. Nothing is measured here.

    Raises:
        StartupError: The model cannot be opened or planned.
    """
    checkpoint = open_model(settings.checkpoint_directory)
    found = looked_up(facts, settings, checkpoint)
    measurements = None if found.calibration is None else found.calibration.measurements
    return Explained(checkpoint.name, facts, checkpoint.needs(), found.plan, measurements, _origin(found))


def _origin(found: Prepared) -> str:
    if found.calibration is not None:
        age, seconds = time.time() - found.calibration.measured_at, found.calibration.measurements.seconds
        return f"{_age(age)}, in {seconds:.1f} s, with this model's shapes"
    if found.is_final:
        return f"no. {found.plan.calibrate.reason}"
    return f"not yet: a start measures in a few seconds; to measure now: armature calibrate --model {found.checkpoint.directory}"


def _age(seconds: float) -> str:
    for size, one in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{count(int(seconds // size), one)} ago"
    return "just now"


def render_explained(explained: Explained) -> RenderableType:
    """Return the explanation as tables for the console."""
    parts: list[RenderableType] = [_head(explained)]
    believed = explained.measurements if explained.measurements and not explained.measurements.fallback else None
    shown = [] if believed is None else _shown(believed, explained.plan)
    if shown:
        parts += ["", _speeds(shown, explained)]
    return Group(*parts, "", _choices(explained), *_expected(explained.plan))


def _head(explained: Explained) -> Table:
    facts, needs = explained.facts, explained.needs
    limits = f"; the quota is {facts.cgroup.quota_cores:g} cores" if facts.cgroup.quota_cores is not None else ""
    table = _plain(f"{explained.name} on this machine")
    table.add_row(
        "model",
        f"{needs.architecture}, {needs.num_parameters / 1e6:,.0f}M parameters, {gib(needs.weight_bytes)} of {needs.stored_dtype}"
        + ("" if needs.kind == "program" else f", made for {needs.max_model_len:,} tokens"),
    )
    table.add_row("processor", f"{processor(facts)}, {count(len(facts.cores), 'core')}{limits}")
    table.add_row("memory", f"{gib(facts.usable_bytes)} available of {gib(facts.memory_limit_bytes)}")
    device = _device(explained)
    if device:
        table.add_row("device", device)
    fallback = explained.measurements.fallback if explained.measurements else ""
    table.add_row("measured", f"{explained.origin}; not used, since {fallback}" if fallback else explained.origin)
    return table


def _device(explained: Explained) -> str:
    """Describe the accelerator that serves, or return an empty string for the CPU."""
    facts, plan = explained.facts, explained.plan
    if plan.device.value == "mps":
        return apple_gpu(facts)
    chosen = plan.gpu(facts)
    return "" if chosen is None else gpu(chosen)


def _speeds(shown: list[Trial], explained: Explained) -> Table:
    """Return the table of tokens (or rows) per second of each trial, measured with almost no context.

    The chosen trial is marked.
    """
    phases, unit = ((_ROWS,), "rows") if explained.needs.kind == "program" else (PHASES, "tokens")
    columns = [(phase, *column) for phase in phases for column in phase.columns(shown)]
    table = Table(title=f"Measured {unit}/s", title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in shown:
        table.add_row(_way(trial, explained.plan), *(_speed(phase.read(trial), size) for phase, _, size in columns))
    return table


def _shown(measurements: Measurements, plan: ServingPlan) -> list[Trial]:
    """Return the trials to show: the chosen one first, then those timed at the most sizes."""
    timed = [trial for trial in measurements.trials if (trial.decode_seconds and trial.prefill_seconds) or trial.encode_seconds]
    known = sorted(timed, key=lambda trial: -sum(len(phase.read(trial)) for phase in PHASES))
    return sorted(known, key=lambda trial: not _is_chosen(trial, plan))[:_MOST_TRIALS]


def _columns(tables: list[Mapping[int, float]]) -> list[int]:
    """Return at most `_MAX_COLUMNS` sizes: those that all trials share, then the largest."""
    sizes = sorted({size for table in tables for size in table})
    shared = [size for size in sizes if all(size in table for table in tables)]
    rest = [size for size in reversed(sizes) if size not in shared]
    return sorted((shared + rest)[:_MOST_COLUMNS])


def _speed(table: Mapping[int, float], size: int) -> str:
    return rate(size / table[size]) if table.get(size, 0) > 0 else "–"


def _is_chosen(trial: Trial, plan: ServingPlan) -> bool:
    wanted = (plan.precision.value, plan.threads.value, plan.int8_copy.value)
    return (trial.precision, trial.threads, trial.int8_copy) == wanted


def _way(trial: Trial, plan: ServingPlan) -> str:
    copy = " + int8" if trial.int8_copy else ""
    return f"{'▸' if _is_chosen(trial, plan) else ' '} {trial.precision}{copy}, {count(trial.threads, 'thread')}"


def _choices(explained: Explained) -> Table:
    plan, needs = explained.plan, explained.needs
    table = Table(title="Chosen", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    decisions = dict(plan.decisions())
    for name in _TOLD:
        decision = decisions[name]
        told = name not in _GENERATING if not needs.generates else name != "batch_target_tokens"
        told = told and not (needs.kind == "program" and name == "max_model_len")
        told = told and (name != "device" or bool(explained.facts.cuda) or explained.facts.mps)
        told = told and (name != "cuda_device" or decision.value is not None)
        if told and (name != "int8_copy" or plan.precision.value == "int4"):
            table.add_row(name, "auto" if decision.value is None else value_of(name, decision.value), decision.reason)
    return table


def _expected(plan: ServingPlan) -> Iterator[RenderableType]:
    """Yield the table of expected capacity, if it was measured."""
    if not plan.capacity_tokens_per_second.value:
        return
    table = _plain("Expected performance")
    table.add_row("capacity", plan.capacity_tokens_per_second.reason)
    table.add_row("ceilings", plan.roofline_ratio.reason)
    yield ""
    yield table


def _plain(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
