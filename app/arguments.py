"""What may stand behind `armature`: commands and their flags. Every setting is a flag of every command that loads a model.

Only words here: what a command does is `cli`'s business.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench_flags import bench_flags, cost_flags
from app.errors import UnknownArgument
from app.settings import Settings, setting_rows
from app.version import VERSION


@dataclass(frozen=True, slots=True)
class Bench:
    """`flags`: those of `bench_flags` that it takes, each with its default; None where there is none."""

    what: str
    flags: Mapping[str, Any]


# One line here and one in `benches` (measured from within) or in `bench/over_http` is a bench.
BENCHES: Mapping[str, Bench] = {
    "kernels": Bench(
        "the products and decode attention alone, by form and number of rows, held against this machine's ceilings",
        {"--rounds": 5},
    ),
    "engine": Bench(
        "the engine alone, step by step, held against this machine's memory and compute ceilings",
        {"--rounds": 3, "--rows": None, "--prompts": None, "--steps": None},
    ),
    "quality": Bench(
        "a text's perplexity at each precision, and how often the likeliest token is the one that FP32 has",
        {"--text": None, "--tokens": None},
    ),
    "speculation": Bench(
        "what guessing the next tokens brings when guesses are right so often: planted acceptance, at one greedy sequence",
        {"--rounds": 5},
    ),
    "eager": Bench("decode steps by the interpreter against the same run again natively, FP32 beside them", {"--rounds": 5}),
    "recording": Bench("what it costs to know of each step how long it took and why", {"--rounds": 5}),
    "http": Bench(
        "a server under load, which generates, embeds or infers: ours, or any that speaks the same dialect",
        {
            "--kind": "generate",
            "--url": None,
            "--api": None,
            "--concurrency": None,
            "--rate": None,
            "--num-requests": None,
            "--seconds": None,
            "--prompt-tokens": None,
            "--max-tokens": None,
            "--ignore-eos": None,
            "--texts": None,
            "--lengths": None,
            "--batch": None,
            "--below": None,
            "--warmup": None,
            "--seed": 0,
            "--api-key": None,
            "--slo-ttft-ms": None,
            "--slo-itl-ms": None,
            "--against": None,
            "--rounds": 1,
        },
    ),
    "compare": Bench(
        "this machine with one model, as a result file; or of RESULTs one report, machine against machine",
        {
            "results": None,
            "--url": None,
            "--name": None,
            "--instance": None,
            "--output": None,
            "--seconds": None,
            "--seed": 0,
            "--api-key": None,
            "--report": None,
            "--force": None,
        },
    ),
    "start": Bench("seconds from the start of the process to a first token", {"--rounds": 5}),
    "itl": Bench(
        "inter-token latency of running streams while a long prompt arrives", {"--rounds": 5, "--tokens": 2000, "--url": None}
    ),
    "prefix": Bench(
        "time to first token of a second request that shares a long prefix", {"--rounds": 5, "--tokens": 1000, "--url": None}
    ),
    "memory": Bench("resident memory, held against weights and touched KV", {"--rounds": 5}),
    "wait": Bench(
        "what a server says of its capacity and of the wait for a first token, against what they are",
        {"--rounds": 5, "--url": None},
    ),
    "overhead": Bench("the share of wall time that is not the model, at decode ×8 over HTTP", {"--rounds": 5, "--url": None}),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """`command` (and `bench`) with their flags. Raises `UnknownArgument`; on a bad value argparse itself exits with status 2."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        command = " ".join(filter(None, (arguments.command, getattr(arguments, "bench", None))))
        complaint = _complaint(unknown, hasattr(arguments, "results"))
        raise UnknownArgument(f"armature {command}: {complaint} armature {command} --help lists the flags.")
    return arguments


def settings_given(arguments: argparse.Namespace) -> dict[str, str]:
    """Settings that stand on the command line, as text."""
    return {name: getattr(arguments, name) for name in Settings.model_fields if hasattr(arguments, name)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="armature", description="Serves small language models on ordinary processors.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"armature {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_settings(_command(commands, "serve", "serve a checkpoint over HTTP"))
    probe = _command(commands, "probe", "what this machine is and what would be done with it, each decision with its reason")
    probe.add_argument("--json", action="store_true", help="print one JSON object")
    _add_settings(probe)
    pack = _command(commands, "pack", "quantise and pack a checkpoint's weights now, and keep them for every start")
    pack.add_argument(
        "--text", type=Path, metavar="FILE", help="what the model will be used for: makes better codes of four bits"
    )
    _add_settings(pack)
    calibrate = _command(commands, "calibrate", "measure this machine with a model's shapes now, and keep it for every start")
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_settings(calibrate)
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, each in BENCHES.items():
        _add_bench(benches, name, each)
    costs = _command(commands, "tco", "what a load costs on each machine, from result files and prices", files="[RESULT…] ")
    for flag, words in cost_flags().items():
        costs.add_argument(flag, **words)
    return parser


def _add_bench(benches: Any, name: str, bench: Bench) -> None:
    parser = _command(benches, name, bench.what, within="bench ", files="[RESULT…] " if "results" in bench.flags else "")
    known = bench_flags()
    for flag, default in {"--json": None, **bench.flags}.items():
        words = dict(known[flag])
        shown = default[0] if isinstance(default, tuple) else default
        text = words.pop("help") + ("" if default is None else f" (default {shown})")
        parser.add_argument(flag, default=default, help=text, **words)
    _add_settings(parser)


def _command(commands: Any, name: str, what: str, within: str = "", files: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        usage=f"armature {within}{name} {files}[FLAGS]",
        allow_abbrev=False,
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings", "Each is an environment variable too, the one in brackets; a flag wins.")
    for row in setting_rows():
        default = f" Default: {row.default}." if row.default else ""
        text = f"{row.description}{default} [{row.variable}]".replace("%", "%%")
        metavar = row.values.replace(" ", "_")
        group.add_argument(row.flag, dest=row.name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _complaint(unknown: list[str], takes_files: bool) -> str:
    """Names the first flag that was not understood, or else the first word."""
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        if takes_files:
            return f"{word!r} is not understood: result files stand together, before the flags or after them."
        return f"{word!r} is not understood. A checkpoint is given as --model {word}."
    flag = word.partition("=")[0]  # what stands behind it may be a secret
    known = [*(row.flag for row in setting_rows()), *bench_flags(), *cost_flags(), "--help"]
    near = difflib.get_close_matches(flag, [one for one in known if one != flag], n=1)  # another command may have this one
    return f"there is no flag {flag}." + (f" Did you mean {near[0]}?" if near else "")
