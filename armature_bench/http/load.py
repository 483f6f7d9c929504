"""Benches that measure a server over HTTP, by name, among them `armature bench http` with its load levels.

Under load, a server is measured alone or alternating with a second one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, MeasurementFailed, progress
from armature_bench.http.latency import inter_token_latency, pictures, shared_prefix
from armature_bench.http.loops import LoadRun, RunLimits, ServerRuns
from armature_bench.http.overhead import (
    NUM_FAST_STREAMS,
    NUM_SHORT_REQUESTS,
    PLACES,
    overhead_outside_model,
    short_request_cost,
    streamed_token_cost,
)
from armature_bench.http.process import resident_memory, time_to_first_token
from armature_bench.http.server import BenchServer, running_server
from armature_bench.http.tally import cpu_figure
from armature_bench.http.wait import LOAD_FRACTIONS, capacity_and_wait
from armature_bench.http.wire import HttpClient, event_loop
from armature_bench.http.workload import poisson_arrivals

DEFAULT_CLIENTS = (1, 8, 32)
TICK_SECONDS = 0.5
HIGH_CLIENT_CPU = 10.0  # percent of a core

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A load level: a number of closed-loop clients, or a rate of arrivals per second."""

    clients: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        """Label of the level in tables, such as `×8` or `2/s`."""
        return f"×{self.clients}" if self.clients else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server to measure: the one at `url`, or else a new Armature server with `flags`.

    `preferred` is the model that is asked for if `model` is None and the server has it.
    """

    url: str | None
    flags: tuple[str, ...] = ()
    api: str = "completions"
    model: str | None = None
    api_key: str | None = None
    preferred: str | None = None

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "ours" if self.url is None else self.url.rpartition("//")[2]


class TrafficSender(Protocol[A]):
    async def warm_up(self, num_requests: int) -> None:
        """Send requests that are not recorded."""

    async def run_closed_loop(self, run: LoadRun[A], num_clients: int, bounds: RunLimits) -> None: ...

    async def run_open_loop(self, run: LoadRun[A], moments: Iterable[float], bounds: RunLimits) -> None:
        """Send requests at these moments, in seconds from the start."""


class LoadBench(Protocol[A]):
    """A kind of request, and the evaluation of its answers.

    `unit` names the unit that the progress display counts, such as `text`.
    """

    @property
    def unit(self) -> str: ...

    @property
    def seed(self) -> int:
        """Seed of prompts, lengths and arrivals."""

    def bounds(self, level: LoadLevel) -> RunLimits:
        """Return the limits of a run if the user gave none."""

    async def traffic(self, wire: HttpClient, target: ServerTarget) -> tuple[TrafficSender[A], str]:
        """Return the sender for one server, and a description of what it sends."""

    def figures(self, side: ServerRuns[A], against: ServerRuns[A] | None) -> Iterator[Figure]:
        """Yield the figures of one server under one load, compared with `against` if given."""

    def caveats(self, name: str, answered: Sequence[A], prompts: str) -> Iterator[str]: ...

    def record(self, answered: A, started: float) -> dict[str, Any]: ...

    def details(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One run of the bench. The first target is measured; a second one is the reference, measured in alternation."""

    subject: str
    targets: Sequence[ServerTarget]
    levels: Sequence[LoadLevel]
    bench: LoadBench[Any]
    bounds: RunLimits
    rounds: int = 1
    warm_up: int | None = None  # number of requests; None: one per client


@dataclass(slots=True)
class LoadResults:
    runs: dict[tuple[LoadLevel, int], list[LoadRun[Any]]] = field(
        default_factory=dict
    )  # keys: level and index of the target
    prompts: dict[int, str] = field(default_factory=dict)


def measure_load(job: LoadJob) -> BenchOutcome:
    """Run the bench. Ctrl-C stops early and keeps all answered requests.

    Raises `MeasurementFailed` if no request was answered.
    """
    found, complete = LoadResults(), True
    try:
        with event_loop() as runner:
            runner.run(_measured(job, found))
    except KeyboardInterrupt:
        complete = False
    runs = [run for level_runs in found.runs.values() for run in level_runs]
    if not any(run.answered for run in runs):
        first = next((message for run in runs for message in run.messages.values()), "nothing was answered")
        raise MeasurementFailed(first if complete else "interrupted before anything was answered")
    return BenchOutcome(
        "http", job.subject, tuple(_figures(job, found)), _details(job, found), complete, tuple(_notes(job, found))
    )


async def _measured(job: LoadJob, found: LoadResults) -> None:
    with progress(len(job.levels) * len(job.targets) * job.rounds, "starting") as advance:
        async with AsyncExitStack() as stack:
            traffics = [await _traffic(job, target, index, found, stack) for index, target in enumerate(job.targets)]
            for level in job.levels:
                for number in range(job.rounds):
                    order = list(enumerate(traffics))
                    for index, traffic in reversed(order) if number % 2 else order:  # the order alternates
                        run = LoadRun[Any]()
                        found.runs.setdefault((level, index), []).append(run)
                        await _run_once(job, level, traffic, run, advance)


async def _traffic(
    job: LoadJob, target: ServerTarget, index: int, found: LoadResults, stack: AsyncExitStack
) -> TrafficSender[Any]:
    url = target.url or (await stack.enter_async_context(running_server(None, target.flags))).url
    wire = stack.enter_context(closing(HttpClient(url, target.api_key)))
    traffic, found.prompts[index] = await job.bench.traffic(wire, target)
    return traffic


async def _run_once(
    job: LoadJob, level: LoadLevel, traffic: TrafficSender[Any], run: LoadRun[Any], advance: AdvanceProgress
) -> None:
    await traffic.warm_up((level.clients or 1) if job.warm_up is None else job.warm_up)
    bounds = job.bench.bounds(level) if job.bounds == RunLimits() else job.bounds
    watching = asyncio.create_task(
        report_progress(f"{level.label}: {{:,.0f}} {job.bench.unit}s/s", bounds, run, advance)
    )
    try:
        if level.clients:
            await traffic.run_closed_loop(run, level.clients, bounds)
        else:
            await traffic.run_open_loop(run, poisson_arrivals(level.rate, job.bench.seed), bounds)
    finally:
        watching.cancel()


async def report_progress(label: str, bounds: RunLimits, run: LoadRun[Any], advance: AdvanceProgress) -> None:
    """Report progress and the current rate every `TICK_SECONDS`; this rate is low enough to cost nothing."""
    reported = 0.0
    try:
        while True:
            before, since = run.num_units, time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            rate, done = (run.num_units - before) / (time.perf_counter() - since), run.done(bounds)
            advance(label.format(rate), max(0.0, done - reported))
            reported = max(reported, done)
    finally:
        advance(label.partition(":")[0], 1.0 - reported)


def _servers_under_load(job: LoadJob, found: LoadResults) -> Iterator[tuple[ServerRuns[Any], ServerRuns[Any] | None]]:
    """Yield each server under each level, paired with the second server as the reference of the first."""
    for level in job.levels:
        sides = []
        for index, target in enumerate(job.targets):
            name = target.name if len(job.targets) > 1 else ""
            sides.append(
                ServerRuns(
                    f"{level.label} {name}".rstrip(), name, found.runs.get((level, index), []), bool(level.clients)
                )
            )
        for index, side in enumerate(sides):
            yield side, sides[1] if index == 0 and len(sides) > 1 else None


def _figures(job: LoadJob, found: LoadResults) -> Iterator[Figure]:
    for side, against in _servers_under_load(job, found):
        yield from job.bench.figures(side, against)
    yield cpu_figure((run for runs in found.runs.values() for run in runs), job.bench.unit)


def _notes(job: LoadJob, found: LoadResults) -> Iterator[str]:
    for index, target in enumerate(job.targets):
        answered = [
            each
            for (_, which), level_runs in found.runs.items()
            if which == index
            for run in level_runs
            for each in run.answered
        ]
        if answered:
            yield from job.bench.caveats(target.name, answered, found.prompts.get(index, ""))
    cpu = cpu_figure(run for runs in found.runs.values() for run in runs)
    if cpu.value > HIGH_CLIENT_CPU:
        yield f"This client took {cpu.value:.0f}% of a core: on a machine with few cores this slows the server down."
    for kind, message in {
        kind: text for runs in found.runs.values() for run in runs for kind, text in run.messages.items()
    }.items():
        yield f"{kind}: {message}"


def _details(job: LoadJob, found: LoadResults) -> dict[str, Any]:
    stretches = [
        {
            "level": level.label,
            "server": job.targets[index].url or "ours",
            "seconds": round(run.ended - run.started, 6),
            "sent": run.num_sent,
            "failed": dict(run.failures),
            "requests": [job.bench.record(each, run.started) for each in run.answered],
        }
        for (level, index), runs in found.runs.items()
        for run in runs
    ]
    return {
        **job.bench.details(),
        "seed": job.bench.seed,
        "rounds": job.rounds,
        "apis": [target.api for target in job.targets],
        "flags": [list(target.flags) for target in job.targets],
        "runs": stretches,
    }


@dataclass(frozen=True, slots=True)
class ServerBenchJob:
    """One run of a bench over HTTP.

    `flags` are passed to `armature serve` for a new server; `url` is a server that already runs. `tokens` is the length
    of the long prompt or of the prefix, `image` the width and height of pictures. Memory is compared with
    `weight_bytes` and `kv_bytes_per_token`. A simulated server has the tokenizer of the checkpoint `tokenizer`; None:
    there is none.
    """

    bench: str
    subject: str
    flags: tuple[str, ...]
    url: str | None = None
    rounds: int = 5
    tokens: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    tokenizer: Path | None = None
    image: tuple[int, int] = (0, 0)


def measure_server(job: ServerBenchJob) -> BenchOutcome:
    """Run the bench of one command. Raises `MeasurementFailed` if the server could not be measured."""
    special = {
        "start": job.rounds + 1,
        "memory": 1,
        "wait": 1 + len(LOAD_FRACTIONS) * job.rounds,
        "overhead": job.rounds
        if job.tokenizer is None
        else len(PLACES) * (job.rounds + len(NUM_FAST_STREAMS)) + 1 + NUM_SHORT_REQUESTS,
    }
    units = special.get(job.bench, job.rounds)
    with progress(units, f"bench {job.bench}") as advance, event_loop() as runner:
        figures = runner.run(_measured_figures(job, advance))
    return BenchOutcome(
        job.bench, job.subject, tuple(figures), {"rounds": job.rounds, "flags": list(job.flags), "url": job.url}
    )


async def _measured_figures(job: ServerBenchJob, advance: AdvanceProgress) -> Sequence[Figure]:
    flags = (*_DEFAULT_FLAGS.get(job.bench, ()), *job.flags)
    if job.bench == "start":  # it starts its own servers, one after the other
        return await time_to_first_token(job.flags, job.rounds, advance)
    async with running_server(job.url, flags) as server:
        figures = await SERVER_BENCHES[job.bench](server, job, advance)
    if job.bench == "overhead" and job.tokenizer is not None:
        figures = [*figures, *await streamed_token_cost(job.tokenizer, job.rounds, advance)]
        figures += await short_request_cost(job.tokenizer, job.rounds, advance)
    return figures


# Default flags of a new server. Reported capacity excludes speculation, because its gain depends on the text. With
# speculation, several tokens arrive at once with long gaps in between. These would hide the gaps that prompts cause.
_DEFAULT_FLAGS: Mapping[str, tuple[str, ...]] = dict.fromkeys(("wait", "itl", "pictures"), ("--speculation=off",))

SERVER_BENCHES: Mapping[str, Callable[[BenchServer, ServerBenchJob, AdvanceProgress], Awaitable[Sequence[Figure]]]] = {
    "itl": lambda server, job, advance: inter_token_latency(server.client, job.tokens, job.rounds, advance),
    "pictures": lambda server, job, advance: pictures(server.client, job.image, job.rounds, advance),
    "prefix": lambda server, job, advance: shared_prefix(server.client, job.tokens, job.rounds, advance),
    "memory": lambda server, job, advance: resident_memory(server, job.weight_bytes, job.kv_bytes_per_token, advance),
    "wait": lambda server, job, advance: capacity_and_wait(server.client, job.rounds, advance),
    "overhead": lambda server, job, advance: overhead_outside_model(server.client, job.rounds, advance),
}
