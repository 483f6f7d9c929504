"""What each `armature bench` starts, by name: measured from within this process, or of a server over HTTP.

Torch is imported by the benches themselves, when the environment that its thread pools read is set.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace

from app.bench.over_http import Job, measure
from app.bench.stats import Outcome
from app.hardware.room import kv_bytes_per_token
from app.preparation import Prepared, calibrate, prepare
from app.settings import Settings, setting_rows


def measured(settings: Settings, arguments: Namespace) -> Outcome:
    """Raises `MeasurementFailed`, or what a start raises."""
    inside = INSIDE.get(arguments.bench)
    return inside(_ready_to_measure(settings), arguments) if inside else measure(_job(settings, arguments))


def _ready_to_measure(settings: Settings) -> Prepared:
    """With the final plan, as serving has it; torch finds the environment that it asks for."""
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    return calibrate(prepared, lambda stage: None)


def _engine(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.inside import Asked, measure

    asked = Asked(arguments.rounds, arguments.rows or (), arguments.prompts or (), arguments.steps)
    return measure(prepared.checkpoint, prepared.plan, prepared.facts, asked)


def _kernels(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.kernels import measure

    return measure(prepared.plan, prepared.facts, arguments.rounds)


def _quality(prepared: Prepared, arguments: Namespace) -> Outcome:
    from app.bench.quality import Subject, measure

    return measure(Subject(prepared.checkpoint, prepared.settings, prepared.facts), arguments.text, arguments.tokens)


INSIDE: Mapping[str, Callable[[Prepared, Namespace], Outcome]] = {"engine": _engine, "kernels": _kernels, "quality": _quality}


def _job(settings: Settings, arguments: Namespace) -> Job:
    """What is asked of a bench over HTTP; `bench/over_http` has them by name."""
    url = getattr(arguments, "url", None)
    flags = tuple(f"{row.flag}={getattr(arguments, row.name)}" for row in setting_rows() if hasattr(arguments, row.name))
    subject, tokens = url or settings.checkpoint_directory.name, getattr(arguments, "tokens", 0)
    job = Job(arguments.bench, subject, flags, url, arguments.rounds, tokens)
    return _with_memory(job, settings) if job.bench == "memory" else job


def _with_memory(job: Job, settings: Settings) -> Job:
    """What resident memory is held against: the weights as they are served, and what a token's keys and values take."""
    prepared = prepare(settings)
    plan = prepared.plan
    kv_bytes = kv_bytes_per_token(prepared.checkpoint.needs(), plan.kv_precision.value)
    return replace(job, weight_bytes=plan.weight_bytes.value, kv_bytes_per_token=kv_bytes)
