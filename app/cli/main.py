"""The command `armature`: one function per command; only commands that compute import torch."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.completion import completion_script
from app.cli.models import list_models, pull_model, remove_models
from app.cli.parser import make_parser, parse_arguments
from app.cli.tables import PlanExplanation
from app.errors import (
    ArmatureError,
    PlanImpossible,
    SettingsInvalid,
    StartupError,
    UnknownArgument,
    raise_kernel_errors_as,
)
from app.hardware.imports import collection_paused
from app.hardware.plan.plan import make_plan
from app.hardware.plan.precision import describe_cost
from app.hardware.probe.probe import probe
from app.server.model_source import open_or_fetch_model
from app.server.prepare import CALIBRATE_COMMAND_SECONDS, Prepared, calibrate, prepare, with_kept_calibration
from app.server.start_console import StartConsole, command_progress
from app.server.termination_log import TerminationMessage
from app.settings import Settings, given_settings, load_settings, one_model
from app.weights.forms import RECIPES
from app.weights.open import require_checkpoint

if TYPE_CHECKING:
    from app.weights.packs import PackFile


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 2 if the operator can correct the error, else 1."""
    try:
        with raise_kernel_errors_as(PlanImpossible):
            return _run(sys.argv[1:] if argv is None else argv)
    except UnknownArgument as error:  # its message already names the command
        print(error.message, file=sys.stderr)
        return error.exit_code
    except ArmatureError as error:
        print(f"armature: {error.message}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartupError) else 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells count
    except BrokenPipeError:  # the reader closed the pipe, for example `armature probe | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE


def _run(argv: Sequence[str]) -> int:
    # Only `serve` may write the pod's termination message: a command run in the same container does not end the pod.
    with TerminationMessage() if argv[:1] == ["serve"] else nullcontext():
        arguments = parse_arguments(argv)
        return COMMANDS[arguments.command](arguments)


def _settings(arguments: Namespace) -> Settings:
    """Return the settings of a command that takes one model."""
    return one_model(_given_settings(arguments))


def _given_settings(arguments: Namespace) -> Settings:
    settings, warnings = load_settings(**given_settings(arguments))
    for warning in warnings:
        print(f"armature: {warning}", file=sys.stderr)
    return settings


def _serve(arguments: Namespace) -> int:
    settings = _given_settings(arguments)
    with closing(StartConsole(has_bars=settings.log_format == "text")) as console:
        console.show("starting")  # the import takes a second
        with collection_paused():
            from app.server.process import serve

    return serve(settings)


def _probe(arguments: Namespace) -> int:
    """Print the whole plan or, with a model, what was chosen for it; the facts even without a plan."""
    from rich.console import Console

    from app.cli.tables import explain_plan, render_explanation, render_probe

    settings, facts = _settings(arguments), probe()
    fields, shown, failure = {"facts": facts.to_json(), "needs": None, "plan": None}, render_probe(facts, None), None
    try:
        if settings.model is None:
            plan = make_plan(facts, None, settings, None, RECIPES.keys())
            fields, shown = {**fields, "plan": plan.to_json()}, render_probe(facts, plan)
        else:
            explained = explain_plan(settings, facts)
            fields, shown = explained.to_json(), render_explanation(explained)
    except StartupError as error:
        failure = error
    if arguments.json:
        print(json.dumps(fields))
    else:
        Console().print(shown)
    if failure is not None:
        raise failure
    return 0


def _pack(arguments: Namespace) -> int:
    print(pack(_settings(arguments), arguments.text))
    return 0


def _calibrate(arguments: Namespace) -> int:
    from app.cli.tables import render_explanation

    explained = calibrate_now(_settings(arguments))
    if arguments.json:
        print(json.dumps(explained.to_json()))
    else:
        from rich.console import Console

        Console().print(render_explanation(explained))
    fallback = explained.measurements.fallback if explained.measurements else ""
    if fallback:
        print(f"armature calibrate: nothing is cached, since {fallback}", file=sys.stderr)
    return 1 if fallback else 0


def _bench(arguments: Namespace) -> int:
    from armature_bench.console import MeasurementFailed, print_outcome
    from armature_bench.run import report_results, run_bench

    try:
        if getattr(arguments, "results", None):  # compare earlier results
            return report_results(arguments)
        outcome = run_bench(_settings(arguments), arguments)
    except MeasurementFailed as error:
        print(f"armature bench {arguments.bench}: {error}", file=sys.stderr)
        return 2 if getattr(arguments, "results", None) else 1
    return print_outcome(outcome, arguments.json)


def _tco(arguments: Namespace) -> int:
    from armature_bench.console import MeasurementFailed
    from armature_bench.tco.command import CostArguments, run_tco

    given = vars(arguments)
    asked = CostArguments(
        paths=tuple(given["results"]),
        machines=tuple(given["machine"]),
        **{
            name: given[name]
            for name in ("target", "p99_ms", "instances", "published", "json", "hours_a_day", "days_a_year")
        },
    )
    try:
        return run_tco(asked)
    except MeasurementFailed as error:
        print(f"armature tco: {error}", file=sys.stderr)
        return 2


def _pull(arguments: Namespace) -> int:
    settings, _ = load_settings(model=arguments.name)
    print(pull_model(settings))
    return 0


def _list(arguments: Namespace) -> int:
    list_models(as_json=arguments.json)
    return 0


def _chat(arguments: Namespace) -> int:
    from app.cli.clients.command import run_chat

    return run_chat(_given_settings(arguments), arguments)


def _top(arguments: Namespace) -> int:
    from app.cli.clients.command import run_top

    return run_top(_given_settings(arguments), arguments)


def _completion(arguments: Namespace) -> int:
    print(completion_script(make_parser(), arguments.shell), end="")
    return 0


COMMANDS: Mapping[str, Callable[[Namespace], int]] = {
    "serve": _serve,
    "probe": _probe,
    "pack": _pack,
    "calibrate": _calibrate,
    "bench": _bench,
    "chat": _chat,
    "completion": _completion,
    "pull": _pull,
    "list": _list,
    "rm": lambda arguments: remove_models(arguments.names, is_confirmed=arguments.yes),
    "tco": _tco,
    "top": _top,
}


def calibrate_now(settings: Settings) -> PlanExplanation:
    """Measure this machine and return the measurements and the chosen plan. Raises `StartupError`."""
    prepared = with_kept_calibration(
        probe(), settings.model_copy(update={"calibrate": "on"}), open_or_fetch_model(settings)
    )
    if prepared.is_final:
        raise PlanImpossible(f"There is nothing to measure. {prepared.plan.decisions['calibrate'].reason}")
    os.environ.update(
        prepared.plan.environment()
    )  # must be set before torch is imported: its thread pools read it then
    with command_progress("calibrate") as console:
        measured = calibrate(prepared, console.show, CALIBRATE_COMMAND_SECONDS)
    assert measured.calibration is not None, "it was not final"
    found, checkpoint, again = measured.calibration.measurements, measured.checkpoint, measured.calibration_file.read()
    is_kept = again is not None and again.measured_at == measured.calibration.measured_at
    where = f"kept in {measured.calibration_file.file}" if is_kept else "not kept"
    origin = f"just now, in {found.seconds:.1f} s; {where}"
    return PlanExplanation(checkpoint.name, measured.facts, checkpoint.needs(), measured.plan, found, origin)


def pack(settings: Settings, text: Path | None = None) -> str:
    """Pack the weights, with `text` for the calibration, and return one line. Raises `StartupError`."""
    prepared = prepare(settings)
    folder = prepared.plan.decisions["pack_folder"]
    if folder.value is None:
        raise PlanImpossible(f"There is nothing to pack. {folder.reason} Use --precision int4 or int8 on a CPU.")
    os.environ.update(
        prepared.plan.environment()
    )  # must be set before torch is imported: its thread pools read it then
    began = time.monotonic()
    with command_progress("pack") as console:
        packed, cost = _pack_weights(prepared, Path(folder.value), console, text)
    if packed is None:
        raise PlanImpossible(
            f"On this machine {prepared.plan.weights.precision} runs on torch's matrix products, which pack the weights at each start."
        )
    if packed.size is None:
        raise SettingsInvalid(
            f"Packed weights cannot be written to {packed.file.parent}. Set cache_dir to a writable folder."
        )
    done = "already complete" if packed.found else "written"
    quality = "" if cost is None else f"; {describe_cost(prepared.needs.kind, cost)}"
    seconds = time.monotonic() - began
    return (
        f"{packed.file}: {done}, {packed.size:,} bytes in {prepared.plan.weights.precision}{quality}, {seconds:.1f} s"
    )


def _pack_weights(
    prepared: Prepared, folder: Path, console: StartConsole, text: Path | None
) -> tuple[PackFile | None, float | None]:
    from app.backends.selection import select_host_backend
    from app.engine.calibration.streaming import calibration_for, measure_encoder_cost
    from app.weights.load import Packing, pack_weights
    from app.weights.packs import PackFolder

    backend = select_host_backend(prepared.plan)
    backend.configure(prepared.plan)
    checkpoint = require_checkpoint(prepared.checkpoint)
    costs: list[float] = []
    packing = Packing(
        PackFolder(folder, console.show_bytes("writing packed weights")),
        make_calibrator=partial(calibration_for, checkpoint, prepared.plan, backend, text),
        replaces_pack=text is not None,
        measure_encoder=partial(measure_encoder_cost, checkpoint, prepared.plan),
        report_cost=costs.append,
    )
    packed = pack_weights(checkpoint, prepared.plan, backend, console.show_bytes("packing weights"), packing)
    for cost in costs:
        prepared.with_quality_cost(cost)
    return packed, next(iter(costs), None)
