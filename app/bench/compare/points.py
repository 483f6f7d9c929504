"""One load on one server: its warm-up, its timed stretch, and what came of it as a `Point`."""

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

MOST_SAMPLES = 10_000  # of any column of a point: a load ends rather than being thinned
WARM_UP_SHARE = 1 / 8  # of a load's seconds, before they begin


class NothingAnswered(MeasurementFailed):
    """All requests of a load failed; the message is the first failure's."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is measured. `origin`: moment 0 (`time.perf_counter`); `local`: it is on this machine."""

    wire: Wire
    model: str
    rhythm: Rhythm
    origin: float
    local: bool
    seconds: float
    idle_watts: float | None = None

    @property
    def client(self) -> Client:
        return Client(self.wire)


async def measured(subject: Subject, load: Load, seed: int, run: Stretch[Any]) -> Point:
    """`run` is filled, for whoever watches. Raises `MeasurementFailed`: of this load, or since the server is gone."""
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
    """What was answered in numbers. Moments become seconds since `subject.origin`."""
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
    # From the start: whoever has but one answer would else have its tokens counted, and not the time that its prompt took.
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
    """Of texts or of rows."""
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
    """As many requests beside each other as there are clients, again and again for a while; once is enough where that takes longer."""
    until = time.perf_counter() + seconds * WARM_UP_SHARE
    while True:
        await sender.warm_up(load.clients)
        if time.perf_counter() >= until:
            return


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection in this client would be a pause in its server's answers."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
