"""`armature bench compare`: measure one machine with one model and write the result file.

Finished loads are written even if Ctrl-C or a server that stops answering ends the run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from app.bench.client import Client
from app.bench.compare.circumstances import between, read
from app.bench.compare.doubts import Measured, doubts
from app.bench.compare.job import MachineJob, is_local, output_of, place_of
from app.bench.compare.loads import loads_for
from app.bench.compare.points import Subject, measured
from app.bench.compare.result import SCHEMA, Load, Point, Result, write_result
from app.bench.compare.rhythm import Rhythm
from app.bench.compare.telling import outcome_of
from app.bench.console import Advance, progress
from app.bench.load import TICK_SECONDS, watch
from app.bench.loops import Bounds, Stretch
from app.bench.server import serving
from app.bench.stats import MeasurementFailed, Outcome
from app.bench.wire import Wire, event_loop

IDLE_SHARE = 1.25  # times a load's seconds, without load: 10 s are enough to measure idle power
SECRET_FLAGS = "--api-key"  # result files are shared, so they must not contain keys
PIECES = {"generate": "token", "embed": "text", "infer": "row"}


@dataclass(slots=True)
class Found:
    """The state of a measurement: all that has been measured so far."""

    began_at: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    info_after: dict[str, Any] = field(default_factory=dict)
    local: bool = True
    told: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    repeats: list[Point] = field(default_factory=list)
    lost_steps: int = 0
    under_way: str = ""
    num_loads: int = 0
    complete: bool = False


def measure_machine(job: MachineJob) -> Outcome:
    """Measure the machine, write the result file and return a summary.

    Raises:
        MeasurementFailed: Not a single load could be measured.
    """
    if not (job.seconds > 0 and math.isfinite(job.seconds)):
        raise MeasurementFailed(f"--seconds {job.seconds:g}: must be above 0 and finite")
    if job.output is not None:
        output_of(job, {})  # fail before measuring if the file cannot be written
    found = Found()
    try:
        with event_loop() as runner:
            runner.run(_measured(job, found))
    except KeyboardInterrupt:
        _ended(found, "Interrupted")
    except MeasurementFailed as error:
        if not found.points:
            raise
        _ended(found, f"The server stopped answering ({error})")
    path = output_of(job, found.info)
    result = result_of(job, found)
    write_result(result, path)
    return outcome_of(result, path)


def _ended(found: Found, how: str) -> None:
    if not found.points:
        raise MeasurementFailed("interrupted before anything was measured")
    measured = len(found.points) + len(found.repeats)
    found.told.append(f"{how} while {found.under_way}: {measured} of {found.num_loads} loads were measured.")


async def _measured(job: MachineJob, found: Found) -> None:
    async with serving(job.target.url, job.target.flags) as server:
        with closing(Wire(server.url, job.target.api_key)) as wire:
            client = Client(wire)
            found.info = found.info_after = await client.info()
            output_of(job, found.info)
            found.local = job.target.url is None or is_local(server.url, found.info)
            await _loads(job, found, client)


async def _loads(job: MachineJob, found: Found, client: Client) -> None:
    wanted = loads_for(found.info)
    found.told += wanted.left_out
    found.began_at = time.time()
    rhythm = Rhythm(client, found.began_at)
    model = job.target.model if job.target.url and job.target.model else found.info["model"]["name"]
    subject = Subject(client.wire, model, rhythm, time.perf_counter(), found.local, job.seconds)
    order = list(_order(wanted.loads))
    found.num_loads = len(order)
    with progress(len(order) + 1, "the machine at rest") as advance:
        found.under_way = "the machine was at rest"
        subject = await _at_rest(subject, advance)
        await rhythm.begin()
        for number, (load, is_repeat) in enumerate(order):
            point = await _one_load(subject, load, job.seed * 1000 + number, found, advance)
            if point is not None:
                (found.repeats if is_repeat else found.points).append(point)
            found.lost_steps = rhythm.lost
    found.complete = True
    found.info_after = await client.info()


def _order(loads: Sequence[Load]) -> Iterator[tuple[Load, bool]]:
    """Yield each load and whether it is a repeat. The first load is repeated in the middle and at the end."""
    for number, load in enumerate(loads):
        yield load, False
        if number == len(loads) // 2:
            yield loads[0], True
    yield loads[0], True


async def _at_rest(subject: Subject, advance: Advance) -> Subject:
    """Return the subject with the machine's idle watts, if the server counts energy."""
    before = await read(subject.client, subject.local)
    looks = max(1, round(subject.seconds * IDLE_SHARE / TICK_SECONDS)) if before.joules else 0
    for _ in range(looks):
        await asyncio.sleep(subject.seconds * IDLE_SHARE / looks)
        advance("the machine at rest", 1 / looks)
    if looks:
        around = between(before, await read(subject.client, subject.local))
        return replace(subject, idle_watts=around.idle_watts)
    advance("the machine at rest")
    return subject


async def _one_load(subject: Subject, load: Load, seed: int, found: Found, advance: Advance) -> Point | None:
    """Measure one load, or return None if the server is ready but could not answer this load.

    Raises:
        RequestBroken: The server is gone.
    """
    run = Stretch[Any]()
    found.under_way = f"measuring {load.name}"
    words = f"{load.name}: {{:,.0f}} {PIECES[load.kind]}s/s"
    watching = asyncio.create_task(watch(words, Bounds(seconds=subject.seconds), run, advance))
    try:
        return await measured(subject, load, seed, run)
    except MeasurementFailed as error:
        if not await subject.client.ready():
            raise
        found.told.append(f"{load.name} is left out, since the server did not answer its requests: {error}.")
        return None
    finally:
        watching.cancel()


def result_of(job: MachineJob, found: Found) -> Result:
    """Build the result file's content from what was measured."""
    place = place_of(job, found.info)
    measured = Measured(
        found.info,
        found.info_after,
        job.version,
        job.target.url,
        found.local,
        found.points,
        found.repeats,
        found.lost_steps,
        found.told,
    )
    return Result(
        schema=SCHEMA,
        name=place.name or "",
        began_at=round(found.began_at, 3),
        measured_by=job.version,
        flags=[flag for flag in job.target.flags if not flag.startswith(SECRET_FLAGS)],
        url=job.target.url,
        instance=place.instance,
        hourly_price=place.hourly_price,
        watts=place.watts,
        complete=found.complete,
        doubts=doubts(measured),
        info=found.info,
        points=found.points,
        repeats=found.repeats,
    )
