"""Measurement of one load on one server: warm-up, timed interval, and the resulting `LoadPoint`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from app.bench import rates, tally
from app.bench.client import Client
from app.bench.compare.circumstances import Circumstances, between, read
from app.bench.compare.result import Load, Point, Steps
from app.bench.compare.rhythm import Rhythm
from app.bench.compare.senders import sender_for
from app.bench.embed_traffic import Embedded
from app.bench.embedding import num_tokens
from app.bench.load import Sender
from app.bench.loops import Bounds, Stretch
from app.bench.stats import MeasurementFailed
from app.bench.traffic import Answered
from app.bench.wire import Wire

MOST_SAMPLES = 10_000  # per column of a point: a load ends early instead of dropping samples
WARM_UP_SHARE = 1 / 8  # warm-up time as a share of a load's seconds, in addition to them


class NothingAnswered(MeasurementFailed):
    """All requests of a load failed. The message is that of the first failure."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The server under test. `origin` is moment 0 (`time.perf_counter`); `local`: it runs on this machine."""

    wire: Wire
    model: str
    rhythm: Rhythm
    origin: float
    local: bool
    seconds: float
    idle_watts: float | None = None

    @property
    def client(self) -> Client:
        """A client on the same connection."""
        return Client(self.wire)


async def measured(subject: Subject, load: Load, seed: int, run: Stretch[Any]) -> Point:
    """Measure one load. `run` is filled meanwhile, so that a progress display can read it.

    Raises:
        MeasurementFailed: No request of this load was answered, or the server is gone.
    """
    sender = await sender_for(subject.wire, subject.model, load, seed)
    await _warm_up(sender, load, subject.seconds)
    with _no_collections():
        before = await read(subject.client, subject.local)
        await sender.clients(run, load.clients, Bounds(_most_requests(load), subject.seconds))
        after = await read(subject.client, subject.local)
    if not run.answered:
        raise NothingAnswered(next(iter(run.messages.values()), "no request was sent"))
    origin = subject.origin
    steps = await subject.rhythm.steps(run.started - origin, run.ended - origin)
    return point_of(load, run, between(before, after), steps, subject)


def point_of(load: Load, run: Stretch[Any], around: Circumstances, steps: Steps, subject: Subject) -> Point:
    """Build the `LoadPoint` of a finished load. Moments become seconds since `subject.origin`."""
    fields = _of_generations(run, subject.origin) if load.kind == "generate" else _of_whole_answers(load, run)
    return Point(
        load=load,
        began=round(run.started - subject.origin, 6),
        **fields,
        failures=dict(run.failures),
        throttled_seconds=around.throttled_seconds,
        stolen_ratio=around.stolen_ratio,
        client_cpu_ratio=around.client_cpu_ratio,
        pressure_ratio=around.pressure_ratio,
        energy=around.energy(fields["seconds"], subject.idle_watts),
        steps=steps,
    )


def _of_generations(run: Stretch[Answered], origin: float) -> dict[str, Any]:
    # Start at the first request: a client with a single answer would else count its tokens but not its prompt's time.
    begin, end = run.started, tally.window(run, closed=True)[1]
    made = sum(tally.tokens_within(each.stream, begin, end) for each in run.answered)
    part = made / sum(each.stream.num_tokens for each in run.answered)
    streams = [each.stream for each in run.answered]
    read_tokens = sum(stream.usage.prompt_tokens for stream in streams if stream.usage is not None)
    moments = [moment for stream in streams for moment, _ in stream.pieces[1:]]
    gaps = [gap for stream in streams for gap in stream.gaps()]
    return {
        "seconds": round(end - begin, 6),
        "samples": round(part * len(streams), 3),
        "read_tokens": round(part * read_tokens),
        "generated_tokens": round(made),
        "request_seconds": _rounded(each.stream.pieces[-1][0] - each.intended for each in run.answered),
        "first_token_seconds": _rounded(map(tally.first_token_seconds, run.answered)),
        "tpot_seconds": _rounded(seconds for seconds in map(tally.seconds_per_token, streams) if seconds is not None),
        "gap_at": [round(moment - origin, 4) for moment in moments],
        "gap_seconds": _rounded(gaps),
    }


def _of_whole_answers(load: Load, run: Stretch[Any]) -> dict[str, Any]:
    """Return the fields of a load of texts or rows, whose answers arrive whole."""
    begin, end = rates.steady(run, closed=True)
    inside = [each for each in run.answered if begin < each.ended <= end]
    return {
        "seconds": round(end - begin, 6),
        "samples": load.batch * len(inside),
        "read_tokens": round(sum(num_tokens(each) for each in inside if isinstance(each, Embedded))),
        "request_seconds": _rounded(each.ended - each.intended for each in run.answered),
    }


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [round(each, 6) for each in seconds]


def _most_requests(load: Load) -> int:
    return max(load.clients, MOST_SAMPLES // max(1, load.max_tokens))


async def _warm_up(sender: Sender[Any], load: Load, seconds: float) -> None:
    """Send one request per client at once, repeatedly for `WARM_UP_SHARE` of `seconds`, but at least once."""
    until = time.perf_counter() + seconds * WARM_UP_SHARE
    while True:
        await sender.warm_up(load.clients)
        if time.perf_counter() >= until:
            return


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn Python's garbage collection off. A collection in this client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
