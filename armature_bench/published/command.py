"""`armature bench published`: the documents' figures beside those of this machine, in one table.

Each measurement runs in a process of its own, one after the other. What does not fit, takes too long or fails is left
out and named.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, MeasurementFailed, format_number, progress
from armature_bench.published.models import GEMMAS, LARGE_LLAMAS, PublishedModel, model_folder
from armature_bench.published.rows import QUICK_TOPICS, TOPICS, PublishedRow, graph_run, published_rows
from armature_bench.published.runs import DEFAULT_SECONDS, PublishedRun, RunFailed, RunResult, measure_run, obstacle
from armature_bench.published.sources import likeness


@dataclass(frozen=True, slots=True)
class PublishedJob:
    """What to measure, and where.

    `usable_bytes` is memory that can be allocated, and `levels` the levels of the native kernels that this machine has,
    the best first. `folder` has models by name and receives those that are missing; None: a temporary one. `seconds`
    limits one measurement. `report` is a file for the table in Markdown.
    """

    facts: Mapping[str, Any]
    usable_bytes: float
    levels: tuple[str, ...]
    topics: tuple[str, ...] = ()
    is_quick: bool = False
    folder: Path | None = None
    seconds: float = DEFAULT_SECONDS
    report: Path | None = None

    @property
    def measured_topics(self) -> tuple[str, ...]:
        """The topics that were asked for, or else all, or a quick run's."""
        return self.topics or (QUICK_TOPICS if self.is_quick else tuple(TOPICS))


@dataclass(slots=True)
class _Session:
    """Results so far, sentences on what was left out, and whether Ctrl-C was pressed.

    `written` are the models with random weights that were written, `given` the directories that were there.
    """

    results: dict[PublishedRun, RunResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    given: dict[str, str] = field(default_factory=dict)
    complete: bool = True


def measure_published(job: PublishedJob) -> BenchOutcome:
    """Measure and return the table. Ctrl-C or SIGTERM ends the running measurement and keeps the others.

    Raises `MeasurementFailed` if a topic is unknown, or the folder or the report cannot be written.
    """
    unknown = [topic for topic in job.topics if topic not in TOPICS]
    if unknown:
        raise MeasurementFailed(f"--only {unknown[0]}: there is {', '.join(TOPICS)}")
    session = _Session()
    try:
        with _interrupted_by_sigterm(), _folder(job.folder) as folder:
            llama, gemma = _largest_models(job, folder, session)
            rows = published_rows(job.measured_topics, job.levels, llama, job.is_quick, gemma)
            runs = list(dict.fromkeys(run for row in rows for run in row.runs))
            with progress(len(runs), "starting") as advance:
                _measure(job, runs, folder, session, advance)
        outcome = _outcome(job, rows, session)
        if job.report is not None:
            job.report.write_text(markdown_table(outcome), encoding="utf-8")
    except OSError as error:
        raise MeasurementFailed(f"{error.filename or 'a file'} cannot be written: {error.strerror}") from error
    return outcome


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the measurement like Ctrl-C, so that no process and no temporary folder stays behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="armature-published-") as made:
        yield Path(made)


def _largest_models(job: PublishedJob, folder: Path, session: _Session) -> tuple[PublishedModel, PublishedModel]:
    """Return the largest Llama and Gemma that fit in FP32, and note why larger ones do not."""
    found = []
    for topic, models, run in (
        ("int4", LARGE_LLAMAS, lambda model: PublishedRun(model, "fp32")),
        ("graph", GEMMAS, graph_run),
    ):
        wanted = not job.is_quick and topic in job.measured_topics
        reasons = {model: obstacle(run(model), job.usable_bytes, folder) for model in models[:-1]}
        fitting = next((model for model, why in reasons.items() if not why), models[-1])
        larger = models[: models.index(fitting)] if wanted else ()
        session.notes += [f"{model.title} in FP32 was left out: {reasons[model]}." for model in larger]
        found.append(fitting)
    return found[0], found[1]


def _measure(
    job: PublishedJob, runs: Sequence[PublishedRun], folder: Path, session: _Session, advance: AdvanceProgress
) -> None:
    try:
        for run in runs:
            advance(run.name, 0)
            why = obstacle(run, job.usable_bytes, folder)
            if not why:
                directory, was_there = model_folder(run.model, folder)
                if was_there and run.model.name not in session.written:
                    session.given[run.model.name] = str(directory)
                session.written.add(run.model.name)
                try:
                    session.results[run] = measure_run(run, directory, job.seconds)
                except RunFailed as error:
                    why = str(error)
            if why:
                session.notes.append(f"{run.name} was left out: {why}.")
            advance(run.name)
    except KeyboardInterrupt:
        session.complete = False


def _outcome(job: PublishedJob, rows: Sequence[PublishedRow], session: _Session) -> BenchOutcome:
    figures = tuple(figure for row in rows if (figure := _figure(job, row, session.results)) is not None)
    cpu = job.facts["cpu"]
    num_cores = len(job.facts["cores"])
    subject = f"{cpu['product'] or cpu['name']}, {num_cores} cores, {job.facts['architecture']}, " + (
        job.levels[0] if job.levels else "without native kernels"
    )
    details = {
        "machine": job.facts,
        "documents": "docs/published.md",
        "models": {name: session.given.get(name, "random weights") for name in sorted(session.written)},
        "runs": {run.name: _measured(result) for run, result in session.results.items()},
    }
    return BenchOutcome(
        "published", subject, figures, details, session.complete, (*session.notes, *_read_note(session)),
        value_name="ours",
    )  # fmt: skip


def _read_note(session: _Session) -> Iterator[str]:
    """Yield how fast memory was read in the runs: one row of decode cannot be faster, and it shows a busy machine."""
    reads = [
        float(found["value"]) for result in session.results.values() if (found := result.figures.get("memory read"))
    ]
    if reads:
        yield f"Memory was read at {min(reads):.0f} to {max(reads):.0f} GB/s in these runs."


def _measured(result: RunResult) -> dict[str, Any]:
    """Return what a reader needs of a run: its figures and the decisions that explain them."""
    decided = {name: result.decided(name) for name in ("precision", "kernels", "threads")}
    return decided | {"figures": [dict(each) for each in result.figures.values()]}


def _figure(job: PublishedJob, row: PublishedRow, results: Mapping[PublishedRun, RunResult]) -> Figure | None:
    ours = row.ours(results)
    if ours is None:
        return None
    if row.theirs is None:
        return Figure(row.name, ours, row.unit)
    cores = int(results[row.runs[0]].decided("threads"))
    machine, theirs = row.theirs.machine, row.theirs.value
    ratio = ours / theirs if row.same_work else None
    parts = {"theirs": theirs}
    if ratio is not None and row.unit != "times" and machine.cores is not None and machine.cores != cores:
        parts["ratio per core"] = ratio * machine.cores / cores
    words = [row.theirs.origin, "up to" if row.theirs.is_limit else "", "" if row.same_work else "another model"]
    against = f"{'; '.join(word for word in words if word)}: {likeness(machine, job.facts, cores)}"
    return Figure(row.name, ours, row.unit, ratio=ratio, against=against, parts=parts)


def markdown_table(outcome: BenchOutcome) -> str:
    """Return the table and the notes in Markdown, for a page that has one table for each machine."""
    lines = [
        f"### {outcome.subject}",
        "",
        "| what | theirs | ours | ratio | whose, and how alike |",
        "|---|---|---|---|---|",
    ]
    for figure in outcome.figures:
        theirs = format_number(figure.parts["theirs"]) if "theirs" in figure.parts else "–"
        ratio = "–" if figure.ratio is None else format_number(figure.ratio)
        if "ratio per core" in figure.parts:
            ratio += f"; {format_number(figure.parts['ratio per core'])} per core"
        ours = f"{format_number(figure.value)} {figure.unit}"
        lines.append(f"| {figure.name} | {theirs} | {ours} | {ratio} | {figure.against or '–'} |")
    return "\n".join([*lines, "", *outcome.notes, ""])
