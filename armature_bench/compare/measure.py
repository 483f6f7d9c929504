"""`armature bench compare`: measure one machine with one model and write the result file.

Finished loads are written even if Ctrl-C or a server that stops answering ends the run.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from armature_bench.compare.environment import MeasurementFacts, conditions_between, measurement_caveats, read_resources
from armature_bench.compare.loads import protocol_loads
from armature_bench.compare.points import ServerUnderTest, StepLogReader, measure_point
from armature_bench.compare.result import SCHEMA, CompareResult, LoadPoint, LoadSpec, write_result
from armature_bench.compare.summary import summarize_result
from armature_bench.console import AdvanceProgress, BenchOutcome, MeasurementFailed, progress
from armature_bench.http.client import ArmatureClient
from armature_bench.http.load import TICK_SECONDS, ServerTarget, report_progress
from armature_bench.http.loops import LoadRun, RunLimits
from armature_bench.http.server import running_server
from armature_bench.http.wire import HttpClient, event_loop

POINT_SECONDS = 8.0
_RESULT_PREFIX = f'{{"schema":"{SCHEMA.partition("/")[0]}/'.encode()  # the first bytes of a result file of any version


@dataclass(frozen=True, slots=True)
class MachineLabels:
    """Labels given to this machine by the operator: report name, price table row, dollars per hour, watts."""

    name: str | None = None
    instance: str | None = None
    hourly_price: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class CompareJob:
    """One `armature bench compare` measurement.

    `seconds` is the duration of each load. If `output` is None, the file name is made from the machine, the model and
    the precision. `version` is the version of this program.
    """

    target: ServerTarget
    labels: MachineLabels
    version: str
    output: Path | None = None
    seconds: float = POINT_SECONDS
    seed: int = 0


def machine_labels(job: CompareJob, info: Mapping[str, Any]) -> MachineLabels:
    """Return the labels of the machine, completed from `/info`; without a name it gets its processor's."""
    place, server_labels = job.labels, info.get("place") or {}
    return MachineLabels(
        place.name or place.instance or _processor_name(info),
        place.instance,
        place.hourly_price or server_labels.get("hourly_price"),
        place.watts or server_labels.get("watts"),
    )


def result_path(job: CompareJob, info: Mapping[str, Any]) -> Path:
    """Return the path of the result file. An existing file is replaced only if it is a result file.

    Raises `MeasurementFailed` if the path cannot be written, or another kind of file exists there.
    """
    path = job.output
    if path is None:
        parts = (machine_labels(job, info).name, info["model"]["name"], info["plan"]["precision"]["value"])
        path = Path("-".join(["armature", *(_slug(str(word)) for word in parts)]) + ".json")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasurementFailed(f"{path} cannot be written: --output must name a file in an existing, writable folder")
    if path.exists() and path.stat().st_size and not _is_result_file(path):
        raise MeasurementFailed(f"{path} exists and is not a result file, so it is not replaced; give another --output")
    return path


def is_local_server(url: str, info: Mapping[str, Any]) -> bool:
    """Return whether the server shares this machine's cores: it has a loopback address and the same kernel."""
    host = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    kernel = (info.get("facts") or {}).get("kernel")
    return loopback and kernel in (None, os.uname().release)


def _is_result_file(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_RESULT_PREFIX)) == _RESULT_PREFIX
    except OSError:
        return False


def _processor_name(info: Mapping[str, Any]) -> str:
    cpu = (info.get("facts") or {}).get("cpu") or {}
    name = str(cpu.get("product") or cpu.get("name") or "machine")
    return " ".join(re.sub(r"\((R|TM|tm)\)|\bCPU\b|\bProcessor\b|@.*", " ", name).split()) or "machine"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed"


IDLE_RATIO = 1.25  # times a load's seconds, without load: 10 s are enough to measure idle power
SECRET_FLAGS = "--api-key"  # result files are shared, so they must not contain keys
PROGRESS_UNITS = {"generate": "token", "embed": "text", "infer": "row"}


@dataclass(slots=True)
class CompareState:
    began_at: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    info_after: dict[str, Any] = field(default_factory=dict)
    local: bool = True
    caveats: list[str] = field(default_factory=list)
    points: list[LoadPoint] = field(default_factory=list)
    repeats: list[LoadPoint] = field(default_factory=list)
    lost_steps: int = 0
    current_stage: str = ""
    num_loads: int = 0
    complete: bool = False


def run_compare(job: CompareJob) -> BenchOutcome:
    """Measure the machine and write the result file. Raises `MeasurementFailed` if no load could be measured."""
    if not (job.seconds > 0 and math.isfinite(job.seconds)):
        raise MeasurementFailed(f"--seconds {job.seconds:g}: must be above 0 and finite")
    if job.output is not None:
        result_path(job, {})  # fail before measuring if the file cannot be written
    found = CompareState()
    try:
        with event_loop() as runner:
            runner.run(_run_measurement(job, found))
    except KeyboardInterrupt:
        _note_early_end(found, "Interrupted")
    except MeasurementFailed as error:
        if not found.points:
            raise
        _note_early_end(found, f"The server stopped answering ({error})")
    path = result_path(job, found.info)
    result = build_result(job, found)
    write_result(result, path)
    return summarize_result(result, path)


def _note_early_end(found: CompareState, how: str) -> None:
    if not found.points:
        raise MeasurementFailed("interrupted before anything was measured")
    measured = len(found.points) + len(found.repeats)
    found.caveats.append(f"{how} while {found.current_stage}: {measured} of {found.num_loads} loads were measured.")


async def _run_measurement(job: CompareJob, found: CompareState) -> None:
    async with running_server(job.target.url, job.target.flags) as server:
        with closing(HttpClient(server.url, job.target.api_key)) as wire:
            client = ArmatureClient(wire)
            found.info = found.info_after = await client.info()
            result_path(job, found.info)
            found.local = job.target.url is None or is_local_server(server.url, found.info)
            await _measure_loads(job, found, client)


async def _measure_loads(job: CompareJob, found: CompareState, client: ArmatureClient) -> None:
    wanted = protocol_loads(found.info)
    found.caveats += wanted.left_out
    found.began_at = time.time()
    rhythm = StepLogReader(client, found.began_at)
    model = job.target.model if job.target.url and job.target.model else found.info["model"]["name"]
    subject = ServerUnderTest(client.wire, model, rhythm, time.perf_counter(), found.local, job.seconds)
    order = list(_with_repeats(wanted.loads))
    found.num_loads = len(order)
    with progress(len(order) + 1, "the machine at rest") as advance:
        found.current_stage = "the machine was at rest"
        subject = await _measure_idle_power(subject, advance)
        await rhythm.begin()
        for number, (load, is_repeat) in enumerate(order):
            point = await _measure_load(subject, load, job.seed * 1000 + number, found, advance)
            if point is not None:
                (found.repeats if is_repeat else found.points).append(point)
            found.lost_steps = rhythm.num_lost_steps
    found.complete = True
    found.info_after = await client.info()


def _with_repeats(loads: Sequence[LoadSpec]) -> Iterator[tuple[LoadSpec, bool]]:
    """Yield each load and whether it is a repeat. The first load is repeated in the middle and at the end."""
    for number, load in enumerate(loads):
        yield load, False
        if number == len(loads) // 2:
            yield loads[0], True
    yield loads[0], True


async def _measure_idle_power(subject: ServerUnderTest, advance: AdvanceProgress) -> ServerUnderTest:
    """Return the subject with the machine's idle watts, if the server counts energy."""
    before = await read_resources(subject.client, subject.local)
    num_ticks = max(1, round(subject.seconds * IDLE_RATIO / TICK_SECONDS)) if before.joules else 0
    for _ in range(num_ticks):
        await asyncio.sleep(subject.seconds * IDLE_RATIO / num_ticks)
        advance("the machine at rest", 1 / num_ticks)
    if num_ticks:
        around = conditions_between(before, await read_resources(subject.client, subject.local))
        return replace(subject, idle_watts=around.idle_watts)
    advance("the machine at rest")
    return subject


async def _measure_load(
    subject: ServerUnderTest, load: LoadSpec, seed: int, found: CompareState, advance: AdvanceProgress
) -> LoadPoint | None:
    """Measure one load, or return None if the server is ready but could not answer this load.

    Raises `HttpRequestFailed` if the server is gone.
    """
    run = LoadRun[Any]()
    found.current_stage = f"measuring {load.name}"
    label = f"{load.name}: {{:,.0f}} {PROGRESS_UNITS[load.kind]}s/s"
    watching = asyncio.create_task(report_progress(label, RunLimits(seconds=subject.seconds), run, advance))
    try:
        return await measure_point(subject, load, seed, run)
    except MeasurementFailed as error:
        if not await subject.client.ready():
            raise
        found.caveats.append(f"{load.name} is left out, since the server did not answer its requests: {error}.")
        return None
    finally:
        watching.cancel()


def build_result(job: CompareJob, found: CompareState) -> CompareResult:
    place = machine_labels(job, found.info)
    measured = MeasurementFacts(
        found.info,
        found.info_after,
        job.version,
        job.target.url,
        found.local,
        found.points,
        found.repeats,
        found.lost_steps,
        found.caveats,
    )
    return CompareResult(
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
        doubts=measurement_caveats(measured),
        info=found.info,
        points=found.points,
        repeats=found.repeats,
    )
