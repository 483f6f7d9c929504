"""The function behind each `armature bench` command: measurements in this process, or of a server over HTTP.

The benches import torch themselves, after the environment variables for its thread pools are set.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.arguments import settings_given
from app.bench.compare.job import POINT_SECONDS, MachineJob, Place
from app.bench.compare.measuring import measure_machine
from app.bench.dialects import DIALECTS
from app.bench.embed_dialects import EMBED_DIALECTS
from app.bench.embed_traffic import Texts
from app.bench.embedding import Embedding
from app.bench.generating import Generation
from app.bench.infer_rows import USUAL_FREE, Rows
from app.bench.inferring import Inferring
from app.bench.load import DEFAULT_CLIENTS, Level, LoadJob, Target, Work, measure_load
from app.bench.loops import Bounds
from app.bench.over_http import Job, measure
from app.bench.stats import MeasurementFailed, Outcome
from app.bench.tally import Objective
from app.bench.traffic import Wanted
from app.bench.workload import Lengths, LogNormal
from app.hardware.probe import probe
from app.hardware.room import kv_bytes_per_token
from app.preparation import Prepared, calibrate, prepare
from app.settings import Settings, setting_rows
from app.version import VERSION
from app.weights.opening import checkpoint_of
from app.weights.program import ProgramCheckpoint

USUAL_TOKENS = (128, 128)


def measured(settings: Settings, arguments: Namespace) -> Outcome:
    """Run a bench and return its outcome.

    Raises:
        MeasurementFailed: The measurement failed or its arguments are invalid.
        StartupError: The model cannot be opened or planned.
    """
    if arguments.bench == "http":
        return measure_load(_load(settings, arguments))
    if arguments.bench == "compare":
        return measure_machine(_machine(settings, arguments))
    inside = INSIDE.get(arguments.bench)
    return inside(_ready_to_measure(settings), arguments) if inside else measure(_job(settings, arguments))


def report(arguments: Namespace) -> int:
    """Compare result files in a report and return the exit status.

    Raises:
        MeasurementFailed: A file cannot be read, or flags were given that only apply to a measurement.
    """
    measuring = ("json", "url", "name", "instance", "output", "seconds", "api_key", *settings_given(arguments))
    given = [f"--{name.replace('_', '-')}" for name in measuring if getattr(arguments, name) is not None]
    if given:
        raise MeasurementFailed(
            f"{', '.join(given)}: these flags apply to a measurement, but RESULTs are given; leave out one or the other"
        )
    from app.bench.report.making import Here, make_report

    return make_report(arguments.results, arguments.report, bool(arguments.force), Here(VERSION, probe().to_json()))


def _ready_to_measure(settings: Settings) -> Prepared:
    """Make the final serving plan and set the environment variables that torch reads."""
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    return calibrate(prepared, lambda stage: None)


def _engine(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench import inside, programs, texts

    asked = inside.Asked(arguments.rounds, arguments.rows or (), arguments.prompts or (), arguments.steps)
    plan, facts = prepared.plan, prepared.facts
    if isinstance(prepared.checkpoint, ProgramCheckpoint):
        return programs.measure(prepared.checkpoint, plan, facts, prepared.step_seconds, asked)
    checkpoint = checkpoint_of(prepared.checkpoint)
    if checkpoint.kind == "encoder":
        return texts.measure(checkpoint, plan, facts, prepared.step_seconds, asked)
    return inside.measure(checkpoint, plan, facts, asked)


def _kernels(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.kernels import measure

    return measure(prepared.plan, prepared.facts, arguments.rounds)


def _quality(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.quality import Subject, measure

    return measure(
        Subject(checkpoint_of(prepared.checkpoint), prepared.settings, prepared.facts), arguments.text, arguments.tokens
    )


def _speculation(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.speculation import measure

    return measure(checkpoint_of(prepared.checkpoint), prepared.plan, prepared.facts, prepared.step_seconds, arguments.rounds)


def _eager(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.recorded import measure

    return measure(checkpoint_of(prepared.checkpoint), prepared.plan, prepared.facts, prepared.settings, arguments.rounds)


def _recording(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.recording import measure

    return measure(prepared.facts, arguments.rounds)


INSIDE: Mapping[str, Callable[[Prepared, Namespace], Outcome]] = {
    "engine": _engine,
    "kernels": _kernels,
    "quality": _quality,
    "speculation": _speculation,
    "eager": _eager,
    "recording": _recording,
}


def _job(settings: Settings, arguments: Namespace) -> Job:
    """Return the job of a bench over HTTP. `bench/over_http` has these benches by name."""
    url = getattr(arguments, "url", None)
    flags = _flags(arguments)
    subject, tokens = url or settings.checkpoint_directory.name, getattr(arguments, "tokens", 0)
    job = Job(arguments.bench, subject, flags, url, arguments.rounds, tokens)
    return _with_memory(job, settings) if job.bench == "memory" else job


def _flags(arguments: Namespace) -> tuple[str, ...]:
    """Return the given settings as flags for a server started by this client."""
    return tuple(f"{row.flag}={getattr(arguments, row.name)}" for row in setting_rows() if hasattr(arguments, row.name))


def _machine(settings: Settings, arguments: Namespace) -> MachineJob:
    """Return the job of `bench compare`. With a URL, `--model` is the model name that the running server uses."""
    if arguments.report is not None or arguments.force:
        raise MeasurementFailed("--report and --force need RESULTs: name the result files to compare")
    url, seconds = arguments.url, arguments.seconds
    of_a_server = [name for name in settings_given(arguments) if name not in ("model", "hourly_price", "watts")]
    if url and of_a_server:
        raise MeasurementFailed(
            f"--{of_a_server[0].replace('_', '-')} does not apply to a server that is already running: leave out --url or this flag"
        )
    target = Target(url, () if url else _flags(arguments), model=getattr(arguments, "model", None), api_key=arguments.api_key)
    place = Place(arguments.name, arguments.instance, settings.hourly_price, settings.watts)
    seconds = POINT_SECONDS if seconds is None else seconds
    return MachineJob(target, place, VERSION, arguments.output, seconds, arguments.seed)


def _load(settings: Settings, arguments: Namespace) -> LoadJob:
    """Return the job of `bench http`. With a URL, `--model` is the model name that the running server uses."""
    kind = KINDS[arguments.kind]
    api = _api(arguments, kind)
    url, key = arguments.url, arguments.api_key
    name = getattr(arguments, "model", None) if url else None
    targets = [Target(url, () if url else _flags(arguments), api, name, key)]
    if arguments.against:
        targets.append(Target(arguments.against, api=api, api_key=key))
    clients = arguments.concurrency or (() if arguments.rate else DEFAULT_CLIENTS)
    levels = [*(Level(clients=each) for each in clients), *(Level(rate=each) for each in arguments.rate or ())]
    work = kind.work(arguments)
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in work.details().items())
    subject = f"{url or settings.checkpoint_directory.name}, {api}, {asked}"
    bounds = Bounds(arguments.num_requests, arguments.seconds)
    return LoadJob(subject, targets, levels, work, bounds, arguments.rounds, arguments.warmup)


def _generation(arguments: Namespace) -> Generation:
    _refuse(arguments, "texts", "lengths", "batch", "below")
    prompts, answers = (Lengths(*(given or USUAL_TOKENS)) for given in (arguments.prompt_tokens, arguments.max_tokens))
    wanted = Wanted(prompts, answers, arguments.ignore_eos is not False, arguments.seed)
    return Generation(wanted, Objective(_seconds(arguments.slo_ttft_ms), _seconds(arguments.slo_itl_ms)))


def _embedding(arguments: Namespace) -> Embedding:
    _refuse(arguments, *_OF_STREAMS, "batch", "below")
    return Embedding(Texts(arguments.texts or 1, _lengths(arguments) or Lengths(*USUAL_TOKENS), arguments.seed))


def _inferring(arguments: Namespace) -> Inferring:
    _refuse(arguments, *_OF_STREAMS, "texts")
    below = 2 if arguments.below is None else arguments.below
    return Inferring(Rows(arguments.batch or 1, _lengths(arguments) or USUAL_FREE, below, arguments.seed))


def _lengths(arguments: Namespace) -> Lengths | LogNormal | None:
    if arguments.lengths is None:
        return None
    shape, low, high = arguments.lengths
    return LogNormal(low, high) if shape == "lognormal" else Lengths(low, high)


_OF_STREAMS = ("prompt_tokens", "max_tokens", "ignore_eos", "slo_ttft_ms", "slo_itl_ms")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request (`--kind`): its API dialects, the default one, and the function that reads its flags."""

    dialects: Collection[str]
    usual: str
    work: Callable[[Namespace], Work[Any]]


KINDS: Mapping[str, Kind] = {
    "generate": Kind(DIALECTS, "completions", _generation),
    "embed": Kind(EMBED_DIALECTS, "openai", _embedding),
    "infer": Kind(("oip",), "oip", _inferring),
}


def _refuse(arguments: Namespace, *names: str) -> None:
    """Refuse flags that do not apply to this kind."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise MeasurementFailed(f"--{name.replace('_', '-')} does not apply to --kind {arguments.kind}")


def _api(arguments: Namespace, kind: Kind) -> str:
    api = arguments.api or kind.usual
    if api not in kind.dialects:
        raise MeasurementFailed(f"--api {api} does not support --kind {arguments.kind}: use {', '.join(kind.dialects)}")
    return str(api)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _with_memory(job: Job, settings: Settings) -> Job:
    """Add the expected memory to the job: size of the served weights, and KV bytes per token."""
    prepared = prepare(settings)
    plan = prepared.plan
    kv_bytes = kv_bytes_per_token(prepared.checkpoint.needs(), plan.kv_precision.value)
    return replace(job, weight_bytes=plan.weight_bytes.value, kv_bytes_per_token=kv_bytes)
