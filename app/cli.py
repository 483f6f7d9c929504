"""The command `armature`: runs the function of each command. Only commands that compute import torch."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from app.arguments import parse, settings_given
from app.errors import ArmatureError, StartupError, UnknownArgument
from app.settings import Settings, load_settings
from app.termination import ReasonLeft


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    An error prints one sentence; the status is 2 if the operator can correct it, else 1.
    """
    try:
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
    with ReasonLeft() if argv[:1] == ["serve"] else nullcontext():
        arguments = parse(argv)
        return COMMANDS[arguments.command](arguments)


def _settings(arguments: Namespace) -> Settings:
    settings, warnings = load_settings(**settings_given(arguments))
    for warning in warnings:
        print(f"armature: {warning}", file=sys.stderr)
    return settings


def _serve(arguments: Namespace) -> int:
    from app.main import serve

    return serve(_settings(arguments))


def _probe(arguments: Namespace) -> int:
    """Print the whole plan or, with a model, what was chosen for it.

    The facts are printed even if no plan can be made.
    """
    from rich.console import Console

    from app.explanation import explain, render_explained
    from app.hardware.plan import make_plan
    from app.hardware.probe import probe
    from app.report import render_probe
    from app.weights.recipes import RECIPES

    settings, facts = _settings(arguments), probe()
    fields, shown, failure = {"facts": facts.to_json(), "needs": None, "plan": None}, render_probe(facts, None), None
    try:
        if settings.model is None:
            plan = make_plan(facts, None, settings, None, RECIPES.keys())
            fields, shown = {**fields, "plan": plan.to_json()}, render_probe(facts, plan)
        else:
            explained = explain(settings, facts)
            fields, shown = explained.to_json(), render_explained(explained)
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
    from app.packing import pack

    print(pack(_settings(arguments), arguments.text))
    return 0


def _calibrate(arguments: Namespace) -> int:
    from app.calibrating import calibrated
    from app.explanation import render_explained

    explained = calibrated(_settings(arguments))
    if arguments.json:
        print(json.dumps(explained.to_json()))
    else:
        from rich.console import Console

        Console().print(render_explained(explained))
    fallback = explained.measurements.fallback if explained.measurements else ""
    if fallback:
        print(f"armature calibrate: nothing is cached, since {fallback}", file=sys.stderr)
    return 1 if fallback else 0


def _bench(arguments: Namespace) -> int:
    from app.bench.console import show
    from app.bench.stats import MeasurementFailed
    from app.benches import measured, report

    try:
        if getattr(arguments, "results", None):  # compare earlier results
            return report(arguments)
        outcome = measured(_settings(arguments), arguments)
    except MeasurementFailed as error:
        print(f"armature bench {arguments.bench}: {error}", file=sys.stderr)
        return 2 if getattr(arguments, "results", None) else 1
    return show(outcome, arguments.json)


def _tco(arguments: Namespace) -> int:
    from app.bench.stats import MeasurementFailed
    from app.bench.tco.command import Asked, print_costs

    results, published = tuple(arguments.results), arguments.published
    asked = Asked(results, arguments.target, arguments.p99_ms, arguments.instances, published, arguments.json)
    try:
        return print_costs(asked)
    except MeasurementFailed as error:
        print(f"armature tco: {error}", file=sys.stderr)
        return 2


COMMANDS: Mapping[str, Callable[[Namespace], int]] = {
    "serve": _serve,
    "probe": _probe,
    "pack": _pack,
    "calibrate": _calibrate,
    "bench": _bench,
    "tco": _tco,
}
