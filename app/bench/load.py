"""`armature bench http`: a server that streams, under clients who wait for their answers or arrivals that do not; alone or by turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from app.bench.console import Advance, progress
from app.bench.dialects import DIALECTS
from app.bench.prompts import prompts_for, served_model
from app.bench.server import serving
from app.bench.stats import Figure, MeasurementFailed, Outcome
from app.bench.tally import Objective, Side, cpu_figure, figures, record
from app.bench.traffic import Bounds, Run, Traffic, Wanted
from app.bench.wire import Wire, event_loop
from app.bench.workload import poisson

DEFAULT_CLIENTS = (1, 8, 32)
WARM_UP_TOKENS = 16
REQUESTS_PER_CLIENT = 4
OPEN_SECONDS = 30.0
TICK_SECONDS = 0.5
MUCH_CPU = 10.0  # per cent of a core
GRAINY = 1.05  # tokens a piece


@dataclass(frozen=True, slots=True)
class Level:
    """So many clients, or so many arrivals a second."""

    clients: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        return f"×{self.clients}" if self.clients else f"{self.rate:g}/s"

    def bounds(self, asked: Bounds) -> Bounds:
        if asked != Bounds():
            return asked
        return Bounds(num_requests=REQUESTS_PER_CLIENT * self.clients) if self.clients else Bounds(seconds=OPEN_SECONDS)


@dataclass(frozen=True, slots=True)
class Target:
    """A server: at `url`, or else one of ours with `flags`."""

    url: str | None
    flags: tuple[str, ...] = ()
    api: str = "completions"
    model: str | None = None
    api_key: str | None = None

    @property
    def name(self) -> str:
        """Short enough for a table."""
        return "ours" if self.url is None else self.url.rpartition("//")[2]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """`targets`: the first is measured, a second one is what it is held against, turn by turn."""

    subject: str
    targets: Sequence[Target]
    levels: Sequence[Level]
    wanted: Wanted
    bounds: Bounds
    objective: Objective
    rounds: int = 1
    warm_up: int | None = None  # requests; None: one a client


@dataclass(slots=True)
class Found:
    """All that has been measured so far, whatever ends it."""

    runs: dict[tuple[Level, int], list[Run]] = field(default_factory=dict)  # by level and target
    prompts: dict[int, str] = field(default_factory=dict)


def measure_load(job: LoadJob) -> Outcome:
    """Ctrl-C keeps what has been answered. Raises `MeasurementFailed` where nothing was."""
    found, complete = Found(), True
    try:
        with event_loop() as runner:
            runner.run(_measured(job, found))
    except KeyboardInterrupt:
        complete = False
    runs = [run for stretch in found.runs.values() for run in stretch]
    if not any(run.answered for run in runs):
        first = next((message for run in runs for message in run.messages.values()), "nothing was answered")
        raise MeasurementFailed(first if complete else "interrupted before anything was answered")
    return Outcome("http", job.subject, tuple(_figures(job, found)), _details(job, found), complete, tuple(_notes(job, found)))


async def _measured(job: LoadJob, found: Found) -> None:
    with progress(len(job.levels) * len(job.targets) * job.rounds, "starting") as advance:
        async with AsyncExitStack() as stack:
            traffics = [await _traffic(job, target, index, found, stack) for index, target in enumerate(job.targets)]
            for level in job.levels:
                for number in range(job.rounds):
                    order = list(enumerate(traffics))
                    for index, traffic in reversed(order) if number % 2 else order:  # who begins changes
                        run = Run()
                        found.runs.setdefault((level, index), []).append(run)
                        await _one_run(job, level, traffic, run, advance)


async def _traffic(job: LoadJob, target: Target, index: int, found: Found, stack: AsyncExitStack) -> Traffic:
    url = target.url or (await stack.enter_async_context(serving(None, target.flags))).url
    wire = stack.enter_context(closing(Wire(url, target.api_key)))
    dialect = DIALECTS[target.api]
    model = target.model or await served_model(wire)
    deck, found.prompts[index] = await prompts_for(wire, dialect, model, job.wanted.seed)
    return Traffic(wire, dialect, model, deck, job.wanted)


async def _one_run(job: LoadJob, level: Level, traffic: Traffic, run: Run, advance: Advance) -> None:
    warm_up = (level.clients or 1) if job.warm_up is None else job.warm_up
    await traffic.warm_up(warm_up, WARM_UP_TOKENS)
    bounds = level.bounds(job.bounds)
    watching = asyncio.create_task(_watch(level, bounds, run, advance))
    try:
        if level.clients:
            await traffic.clients(run, level.clients, bounds)
        else:
            await traffic.arrivals(run, poisson(level.rate, job.wanted.seed), bounds)
    finally:
        watching.cancel()


async def _watch(level: Level, bounds: Bounds, run: Run, advance: Advance) -> None:
    """Says how it goes; looking seldom costs nothing."""
    told = 0.0
    try:
        while True:
            before, since = run.num_pieces, time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            rate, done = (run.num_pieces - before) / (time.perf_counter() - since), run.done(bounds)
            advance(f"{level.label}: {rate:,.0f} tok/s", max(0.0, done - told))
            told = max(told, done)
    finally:
        advance(level.label, 1.0 - told)


def _sides(job: LoadJob, found: Found) -> Iterator[tuple[Side, Side | None]]:
    """Each server under each level, the first one held against the second."""
    for level in job.levels:
        sides = []
        for index, target in enumerate(job.targets):
            name = target.name if len(job.targets) > 1 else ""
            sides.append(Side(f"{level.label} {name}".rstrip(), name, found.runs.get((level, index), []), bool(level.clients)))
        for index, side in enumerate(sides):
            yield side, sides[1] if index == 0 and len(sides) > 1 else None


def _figures(job: LoadJob, found: Found) -> Iterator[Figure]:
    for side, against in _sides(job, found):
        yield from figures(side, job.objective, against)
    yield cpu_figure(run for runs in found.runs.values() for run in runs)


def _notes(job: LoadJob, found: Found) -> Iterator[str]:
    """What one should know before believing the figures."""
    for index, target in enumerate(job.targets):
        runs = [run for (_, which), stretch in found.runs.items() if which == index for run in stretch]
        yield from _doubts(job, target.name, [run for run in runs if run.answered], found.prompts.get(index, ""))
    cpu = cpu_figure(run for runs in found.runs.values() for run in runs)
    if cpu.value > MUCH_CPU:
        yield f"This client took {cpu.value:.0f}% of a core: on few cores that slows the server down."
    for kind, message in {
        kind: text for runs in found.runs.values() for run in runs for kind, text in run.messages.items()
    }.items():
        yield f"{kind}: {message}"


def _doubts(job: LoadJob, name: str, runs: Sequence[Run], prompts: str) -> Iterator[str]:
    answered = [each for run in runs for each in run.answered]
    if not answered:
        return
    streams = [each.stream for each in answered]
    read = [stream.usage.prompt_tokens for stream in streams if stream.usage is not None]
    pieces = sum(len(stream.pieces) for stream in streams)
    tokens = sum(stream.num_tokens for stream in streams)
    yield f"{name}: prompts are {prompts}" + (f", {statistics.median(read):g} tokens as it counts them." if read else ".")
    if any(stream.usage is None for stream in streams):
        yield f"{name}: no usage in its answers: a piece is counted as a token."
    if tokens > GRAINY * pieces:
        yield f"{name}: a piece has {tokens / pieces:.2f} tokens on average: ITL is the time between pieces."
    short = sum(each.stream.num_tokens < each.asked_tokens for each in answered)
    if short and job.wanted.ignore_eos:
        yield f"{name}: {short} of {len(answered)} answers ended before they had as many tokens as were asked for."


def _details(job: LoadJob, found: Found) -> dict[str, Any]:
    stretches = [
        {
            "level": level.label,
            "server": job.targets[index].url or "ours",
            "seconds": round(run.ended - run.started, 6),
            "sent": run.num_sent,
            "failed": dict(run.failures),
            "requests": [record(each, run.started) for each in run.answered],
        }
        for (level, index), runs in found.runs.items()
        for run in runs
    ]
    wanted = job.wanted
    return {
        "prompt_tokens": str(wanted.prompt_tokens),
        "max_tokens": str(wanted.max_tokens),
        "seed": wanted.seed,
        "rounds": job.rounds,
        "apis": [target.api for target in job.targets],
        "flags": [list(target.flags) for target in job.targets],
        "runs": stretches,
    }
