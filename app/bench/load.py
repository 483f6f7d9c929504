"""`armature bench http`: a server under closed-loop or open-loop load, alone or alternating with a second server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from app.bench.console import Advance, progress
from app.bench.loops import Bounds, Side, Stretch
from app.bench.server import serving
from app.bench.stats import Figure, MeasurementFailed, Outcome
from app.bench.tally import cpu_figure
from app.bench.wire import Wire, event_loop
from app.bench.workload import poisson

DEFAULT_CLIENTS = (1, 8, 32)
TICK_SECONDS = 0.5
MUCH_CPU = 10.0  # percent of a core

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Level:
    """A load level: a number of closed-loop clients, or a rate of arrivals per second."""

    clients: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        """Label of the level in tables, such as `×8` or `2/s`."""
        return f"×{self.clients}" if self.clients else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure: the one at `url`, or else a new Armature server with `flags`."""

    url: str | None
    flags: tuple[str, ...] = ()
    api: str = "completions"
    model: str | None = None
    api_key: str | None = None

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "ours" if self.url is None else self.url.rpartition("//")[2]


class Sender(Protocol[A]):
    """Sends requests of one kind to one server."""

    async def warm_up(self, num_requests: int) -> None:
        """Send requests that are not recorded."""

    async def clients(self, run: Stretch[A], num_clients: int, bounds: Bounds) -> None:
        """Run a closed loop of `num_clients` clients."""

    async def arrivals(self, run: Stretch[A], moments: Iterable[float], bounds: Bounds) -> None:
        """Run an open loop with requests at these moments, in seconds from the start."""


class Work(Protocol[A]):
    """A kind of request, and the evaluation of its answers.

    `piece` names the unit that the progress display counts, such as `text`.
    """

    @property
    def piece(self) -> str:
        """Name of the unit that the progress display counts."""

    @property
    def seed(self) -> int:
        """Seed of prompts, lengths and arrivals."""

    def bounds(self, level: Level) -> Bounds:
        """Return the limits of a run if the user gave none."""

    async def traffic(self, wire: Wire, target: Target) -> tuple[Sender[A], str]:
        """Return the sender for one server, and a description of what it sends."""

    def figures(self, side: Side[A], against: Side[A] | None) -> Iterator[Figure]:
        """Yield the figures of one server under one load, compared with `against` if given."""

    def doubts(self, name: str, answered: Sequence[A], prompts: str) -> Iterator[str]:
        """Yield notes that the reader needs to judge the figures."""

    def record(self, answered: A, started: float) -> dict[str, Any]:
        """Return one answered request for the result file."""

    def details(self) -> dict[str, Any]:
        """Return the workload's parameters for the result file."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One run of the bench. The first target is measured; a second one is the reference, measured in alternation."""

    subject: str
    targets: Sequence[Target]
    levels: Sequence[Level]
    work: Work[Any]
    bounds: Bounds
    rounds: int = 1
    warm_up: int | None = None  # number of requests; None: one per client


@dataclass(slots=True)
class Found:
    """All measurements so far; they survive an interruption."""

    runs: dict[tuple[Level, int], list[Stretch[Any]]] = field(default_factory=dict)  # keys: level and index of the target
    prompts: dict[int, str] = field(default_factory=dict)


def measure_load(job: LoadJob) -> Outcome:
    """Run the bench. Ctrl-C stops early and keeps all answered requests.

    Raises:
        MeasurementFailed: No request was answered.
    """
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
                    for index, traffic in reversed(order) if number % 2 else order:  # the order alternates
                        run = Stretch[Any]()
                        found.runs.setdefault((level, index), []).append(run)
                        await _one_run(job, level, traffic, run, advance)


async def _traffic(job: LoadJob, target: Target, index: int, found: Found, stack: AsyncExitStack) -> Sender[Any]:
    url = target.url or (await stack.enter_async_context(serving(None, target.flags))).url
    wire = stack.enter_context(closing(Wire(url, target.api_key)))
    traffic, found.prompts[index] = await job.work.traffic(wire, target)
    return traffic


async def _one_run(job: LoadJob, level: Level, traffic: Sender[Any], run: Stretch[Any], advance: Advance) -> None:
    await traffic.warm_up((level.clients or 1) if job.warm_up is None else job.warm_up)
    bounds = job.work.bounds(level) if job.bounds == Bounds() else job.bounds
    watching = asyncio.create_task(watch(f"{level.label}: {{:,.0f}} {job.work.piece}s/s", bounds, run, advance))
    try:
        if level.clients:
            await traffic.clients(run, level.clients, bounds)
        else:
            await traffic.arrivals(run, poisson(level.rate, job.work.seed), bounds)
    finally:
        watching.cancel()


async def watch(words: str, bounds: Bounds, run: Stretch[Any], advance: Advance) -> None:
    """Report progress and the current rate every `TICK_SECONDS`; this rate is low enough to cost nothing."""
    told = 0.0
    try:
        while True:
            before, since = run.num_pieces, time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            rate, done = (run.num_pieces - before) / (time.perf_counter() - since), run.done(bounds)
            advance(words.format(rate), max(0.0, done - told))
            told = max(told, done)
    finally:
        advance(words.partition(":")[0], 1.0 - told)


def _sides(job: LoadJob, found: Found) -> Iterator[tuple[Side[Any], Side[Any] | None]]:
    """Yield each server under each level, paired with the second server as the reference of the first."""
    for level in job.levels:
        sides = []
        for index, target in enumerate(job.targets):
            name = target.name if len(job.targets) > 1 else ""
            sides.append(Side(f"{level.label} {name}".rstrip(), name, found.runs.get((level, index), []), bool(level.clients)))
        for index, side in enumerate(sides):
            yield side, sides[1] if index == 0 and len(sides) > 1 else None


def _figures(job: LoadJob, found: Found) -> Iterator[Figure]:
    for side, against in _sides(job, found):
        yield from job.work.figures(side, against)
    yield cpu_figure((run for runs in found.runs.values() for run in runs), job.work.piece)


def _notes(job: LoadJob, found: Found) -> Iterator[str]:
    """Yield notes that the reader needs to judge the figures, and one message for each kind of failure."""
    for index, target in enumerate(job.targets):
        answered = [
            each for (_, which), stretch in found.runs.items() if which == index for run in stretch for each in run.answered
        ]
        if answered:
            yield from job.work.doubts(target.name, answered, found.prompts.get(index, ""))
    cpu = cpu_figure(run for runs in found.runs.values() for run in runs)
    if cpu.value > MUCH_CPU:
        yield f"This client took {cpu.value:.0f}% of a core: on a machine with few cores this slows the server down."
    for kind, message in {
        kind: text for runs in found.runs.values() for run in runs for kind, text in run.messages.items()
    }.items():
        yield f"{kind}: {message}"


def _details(job: LoadJob, found: Found) -> dict[str, Any]:
    stretches = [
        {
            "level": level.label,
            "server": job.targets[index].url or "ours",
            "seconds": round(run.ended - run.started, 6),
            "sent": run.num_sent,
            "failed": dict(run.failures),
            "requests": [job.work.record(each, run.started) for each in run.answered],
        }
        for (level, index), runs in found.runs.items()
        for run in runs
    ]
    return {
        **job.work.details(),
        "seed": job.work.seed,
        "rounds": job.rounds,
        "apis": [target.api for target in job.targets],
        "flags": [list(target.flags) for target in job.targets],
        "runs": stretches,
    }
