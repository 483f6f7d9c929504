"""Measurement of one load on one server: warm-up, timed interval, and the resulting `LoadPoint`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from armature_bench.compare.environment import LoadConditions, conditions_between, read_resources
from armature_bench.compare.loads import make_sender
from armature_bench.compare.result import LoadPoint, LoadSpec, StepColumns
from armature_bench.console import MeasurementFailed
from armature_bench.http import loops, tally
from armature_bench.http.client import ArmatureClient
from armature_bench.http.embed import EmbedTiming, num_tokens
from armature_bench.http.load import TrafficSender
from armature_bench.http.loops import LoadRun, RunLimits
from armature_bench.http.tally import GenerateTiming
from armature_bench.http.wire import HttpClient

MAX_STEPS_PER_POINT = 20_000  # per point

CLOCK_TOLERANCE_SECONDS = 0.1  # a smaller difference is network latency, not another clock

_AFTER_ALL_STEPS = 9_000_000_000_000_000

MAX_SAMPLES_PER_COLUMN = 10_000  # per column of a point: a load ends early instead of dropping samples

WARM_UP_SHARE = 1 / 8  # warm-up time as a share of a load's seconds, in addition to them


class NoRequestAnswered(MeasurementFailed):
    """All requests of a load failed. The message is the first failure's."""


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """The server under test. `origin` is moment 0 (`time.perf_counter`); `local`: it runs on this machine."""

    wire: HttpClient
    model: str
    step_log: StepLogReader
    origin: float
    local: bool
    seconds: float
    idle_watts: float | None = None

    @property
    def client(self) -> ArmatureClient:
        return ArmatureClient(self.wire)


async def measure_point(subject: ServerUnderTest, load: LoadSpec, seed: int, run: LoadRun[Any]) -> LoadPoint:
    """Measure one load. `run` is filled meanwhile, so that a progress display can read it.

    Raises `MeasurementFailed` if no request was answered, or the server is gone.
    """
    sender = await make_sender(subject.wire, subject.model, load, seed)
    await _warm_up(sender, load, subject.seconds)
    with _gc_disabled():
        before = await read_resources(subject.client, subject.local)
        await sender.run_closed_loop(run, load.clients, RunLimits(_max_requests(load), subject.seconds))
        after = await read_resources(subject.client, subject.local)
    if not run.answered:
        raise NoRequestAnswered(next(iter(run.messages.values()), "no request was sent"))
    origin = subject.origin
    steps = await subject.step_log.steps(run.started - origin, run.ended - origin)
    return build_point(load, run, conditions_between(before, after), steps, subject)


def build_point(
    load: LoadSpec, run: LoadRun[Any], around: LoadConditions, steps: StepColumns, subject: ServerUnderTest
) -> LoadPoint:
    """Build the `LoadPoint` of a finished load. Moments become seconds since `subject.origin`."""
    fields = _generation_fields(run, subject.origin) if load.kind == "generate" else _batch_fields(load, run)
    return LoadPoint(
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


def _generation_fields(run: LoadRun[GenerateTiming], origin: float) -> dict[str, Any]:
    # Start at the first request: a client with a single answer would else count its tokens but not its prompt's time.
    begin, end = run.started, tally.stream_window(run, closed=True)[1]
    made = sum(tally.tokens_within(each.stream, begin, end) for each in run.answered)
    part = made / sum(each.stream.num_tokens for each in run.answered)
    streams = [each.stream for each in run.answered]
    read_tokens = sum(stream.usage.prompt_tokens for stream in streams if stream.usage is not None)
    moments = [moment for stream in streams for moment, _ in stream.chunks[1:]]
    gaps = [gap for stream in streams for gap in stream.gaps()]
    return {
        "seconds": round(end - begin, 6),
        "samples": round(part * len(streams), 3),
        "read_tokens": round(part * read_tokens),
        "generated_tokens": round(made),
        "request_seconds": _rounded(each.stream.chunks[-1][0] - each.intended for each in run.answered),
        "first_token_seconds": _rounded(map(tally.time_to_first_token, run.answered)),
        "tpot_seconds": _rounded(seconds for seconds in map(tally.seconds_per_token, streams) if seconds is not None),
        "gap_at": [round(moment - origin, 4) for moment in moments],
        "gap_seconds": _rounded(gaps),
    }


def _batch_fields(load: LoadSpec, run: LoadRun[Any]) -> dict[str, Any]:
    """Return the fields of a load of texts or rows, with answers that arrive whole."""
    begin, end = loops.whole_answer_window(run, closed=True)
    inside = [each for each in run.answered if begin < each.ended <= end]
    return {
        "seconds": round(end - begin, 6),
        "samples": load.batch * len(inside),
        "read_tokens": round(sum(num_tokens(each) for each in inside if isinstance(each, EmbedTiming))),
        "request_seconds": _rounded(each.ended - each.intended for each in run.answered),
    }


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [round(each, 6) for each in seconds]


def _max_requests(load: LoadSpec) -> int:
    return max(load.clients, MAX_SAMPLES_PER_COLUMN // max(1, load.max_tokens))


async def _warm_up(sender: TrafficSender[Any], load: LoadSpec, seconds: float) -> None:
    """Send one request per client at once, repeatedly for `WARM_UP_SHARE` of `seconds`, but at least once."""
    until = time.perf_counter() + seconds * WARM_UP_SHARE
    while True:
        await sender.warm_up(load.clients)
        if time.perf_counter() >= until:
            return


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Turn Python's garbage collection off. A collection in this client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(slots=True)
class StepLogReader:
    """Reader of the server's step log.

    `began_at`: moment 0, in seconds since 1970 by this machine's clock.
    """

    client: ArmatureClient
    began_at: float
    num_lost_steps: int = 0  # steps that the server had overwritten, or beyond the limit of a point
    _next: int | None = None

    async def begin(self) -> None:
        """Skip all earlier steps. A server without a step log is not asked again."""
        reply = await self._ask(_AFTER_ALL_STEPS)
        self._next = None if reply is None else int(reply["next"])

    async def steps(self, begin: float, end: float) -> StepColumns:
        """Return the steps that began between two moments. Raises `HttpRequestFailed`."""
        columns: dict[str, list[Any]] = {"at": [], "seconds": [], "phase": [], "tokens": [], "cause": []}
        moments = [begin]
        while self._next is not None and moments[-1] <= end:  # load from another client may never end
            reply = await self._ask(self._next)
            if reply is None or not reply["steps"]["at"]:
                break
            ahead = _server_clock_offset(float(reply["clock"]))
            moments = [at - ahead - self.began_at for at in reply["steps"]["at"]]
            self._next = int(reply["next"]) - sum(moment > end for moment in moments)
            self.num_lost_steps += int(reply["dropped"])
            inside = [index for index, moment in enumerate(moments) if begin <= moment <= end]
            columns["at"] += [round(max(0.0, moments[index]), 4) for index in inside]
            for name in ("seconds", "phase", "tokens", "cause"):
                columns[name] += [reply["steps"][name][index] for index in inside]
        self.num_lost_steps += max(0, len(columns["at"]) - MAX_STEPS_PER_POINT)
        limited = {name: column[:MAX_STEPS_PER_POINT] for name, column in columns.items()}
        return StepColumns(**limited | {"seconds": [round(float(each), 6) for each in limited["seconds"]]})

    async def _ask(self, after: int) -> dict[str, Any] | None:
        answer = await self.client.wire.get(f"/info/steps?after={after}")
        return None if answer.status == 404 else dict(answer.raise_for_status("/info/steps").json())


def _server_clock_offset(clock: float) -> float:
    """Return by how many seconds the server's clock is ahead of this machine's."""
    ahead = clock - time.time()
    return 0.0 if abs(ahead) < CLOCK_TOLERANCE_SECONDS else ahead
