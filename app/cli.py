"""The command `armature`: from arguments to what they start. Torch is imported only by the commands that compute."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from app.arguments import UnknownArgument, parse, settings_given
from app.errors import ArmatureError, StartupError
from app.settings import Settings, load_settings, setting_rows

if TYPE_CHECKING:  # neither the web nor numbers are wanted for `armature --help`
    from app.bench.over_http import Job
    from app.bench.stats import Outcome
    from app.startup import Prepared


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for what the operator can mend, 1 for what they cannot, each with one sentence."""
    try:
        arguments = parse(argv)
        return COMMANDS[arguments.command](arguments)
    except UnknownArgument as error:
        print(error, file=sys.stderr)
        return 2
    except ArmatureError as error:
        print(f"armature: {error.message}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartupError) else 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells count
    except BrokenPipeError:  # `armature probe | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE


def _settings(arguments: Namespace) -> Settings:
    settings, warnings = load_settings(**settings_given(arguments))
    for warning in warnings:
        print(f"armature: {warning}", file=sys.stderr)
    return settings


def _serve(arguments: Namespace) -> int:
    from app.main import serve

    return serve(_settings(arguments))


def _probe(arguments: Namespace) -> int:
    """The facts are shown even where no plan can be made of them."""
    from rich.console import Console

    from app.hardware.facts import plain
    from app.hardware.plan import make_plan
    from app.hardware.probe import probe
    from app.report import render_probe
    from app.weights.checkpoint import open_checkpoint
    from app.weights.recipes import RECIPES

    settings = _settings(arguments)
    facts, plan, needs, failure = probe(), None, None, None
    try:
        needs = None if settings.model is None else open_checkpoint(settings.checkpoint_directory).needs()
        plan = make_plan(facts, None, settings, needs, RECIPES.keys())
    except StartupError as error:
        failure = error
    if arguments.json:
        print(json.dumps({"facts": facts.to_json(), "needs": plain(needs), "plan": plan.to_json() if plan else None}))
    else:
        Console().print(render_probe(facts, plan))
    if failure is not None:
        raise failure
    return 0


def _pack(arguments: Namespace) -> int:
    from app.packing import pack

    print(pack(_settings(arguments), arguments.text))
    return 0


# ---- benches -------------------------------------------------------------------------------------------------------


def _bench(arguments: Namespace) -> int:
    from app.bench.console import show
    from app.bench.stats import MeasurementFailed

    try:
        settings = _settings(arguments)
        inside = _INSIDE.get(arguments.bench)
        outcome = inside(settings, arguments) if inside else _measured_over_http(settings, arguments)
    except ModuleNotFoundError as error:
        if error.name != "httpx":  # only what speaks HTTP needs it, so it is an extra
            raise
        print("armature bench needs an HTTP client: pip install 'armature[bench]', or make venv.", file=sys.stderr)
        return 2
    except MeasurementFailed as error:
        print(f"armature bench {arguments.bench}: {error}", file=sys.stderr)
        return 1
    return show(outcome, arguments.json)


def _measured_engine(settings: Settings, arguments: Namespace) -> Outcome:
    prepared = _ready_to_measure(settings)
    from app.bench.inside import measure

    return measure(prepared.checkpoint, prepared.plan, prepared.facts, arguments.rounds)


def _measured_kernels(settings: Settings, arguments: Namespace) -> Outcome:
    prepared = _ready_to_measure(settings)
    from app.bench.kernels import measure

    return measure(prepared.plan, prepared.facts, arguments.rounds)


def _measured_quality(settings: Settings, arguments: Namespace) -> Outcome:
    prepared = _ready_to_measure(settings)
    from app.bench.quality import Subject, measure

    return measure(Subject(prepared.checkpoint, settings, prepared.facts), arguments.text, arguments.tokens)


_INSIDE: Mapping[str, Callable[[Settings, Namespace], Outcome]] = {
    "engine": _measured_engine,
    "kernels": _measured_kernels,
    "quality": _measured_quality,
}


def _ready_to_measure(settings: Settings) -> Prepared:
    """The thread pools read their environment when torch is imported, which is afterwards."""
    from app.startup import prepare

    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    return prepared


def _measured_over_http(settings: Settings, arguments: Namespace) -> Outcome:
    from app.bench.over_http import Job, measure

    url = getattr(arguments, "url", None)
    flags = tuple(f"{row.flag}={getattr(arguments, row.name)}" for row in setting_rows() if hasattr(arguments, row.name))
    job = Job(
        arguments.bench, url or settings.checkpoint_directory.name, flags, url, arguments.rounds, getattr(arguments, "tokens", 0)
    )
    return measure(_with_memory(job, settings) if job.bench == "memory" else job)


def _with_memory(job: Job, settings: Settings) -> Job:
    """What resident memory is held against: the weights as they are served, and what a token's keys and values take."""
    from app.startup import prepare

    prepared = prepare(settings)
    needs, plan = prepared.checkpoint.needs(), prepared.plan
    kv_bytes = needs.kv_elements_per_token * {"fp32": 4, "bf16": 2, "int8": 1}[plan.kv_precision.value]
    return replace(job, weight_bytes=plan.weight_bytes.value, kv_bytes_per_token=kv_bytes)


COMMANDS: Mapping[str, Callable[[Namespace], int]] = {"serve": _serve, "probe": _probe, "pack": _pack, "bench": _bench}
