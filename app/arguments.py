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

from app.settings import Settings, setting_rows
from app.version import VERSION


@dataclass(frozen=True, slots=True)
class Bench:
    """`flags`: those of `_bench_flags` that it takes, each with its default; None where there is none."""

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
    "http": Bench(
        "generation or embedding by a server under load: ours, or any that speaks OpenAI's dialect",
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
            "--warmup": None,
            "--seed": 0,
            "--api-key": None,
            "--slo-ttft-ms": None,
            "--slo-itl-ms": None,
            "--against": None,
            "--rounds": 1,
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


class UnknownArgument(Exception):
    """Says what was not understood and what was probably meant."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """`command` (and `bench`) with their flags. Raises `UnknownArgument`; on a bad value argparse itself exits with status 2."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        command = " ".join(filter(None, (arguments.command, getattr(arguments, "bench", None))))
        raise UnknownArgument(f"armature {command}: {_complaint(unknown)} armature {command} --help lists the flags.")
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
    return parser


def _add_bench(benches: Any, name: str, bench: Bench) -> None:
    parser = _command(benches, name, bench.what, within="bench ")
    known = _bench_flags()
    for flag, default in {"--json": None, **bench.flags}.items():
        words = dict(known[flag])
        shown = default[0] if isinstance(default, tuple) else default
        text = words.pop("help") + ("" if default is None else f" (default {shown})")
        parser.add_argument(flag, default=default, help=text, **words)
    _add_settings(parser)


def _bench_flags() -> dict[str, dict[str, Any]]:
    """What benches may be asked beside the settings, as argparse takes it."""
    return {
        "--json": {"type": Path, "metavar": "PATH", "help": "write the JSON object there as well"},
        "--rounds": {"type": _count, "metavar": "N", "help": "how often to measure"},
        "--rows": {
            "type": _counts,
            "metavar": "N,N",
            "help": "sequences that decode together, or texts of a batch; only these, and --prompts",
        },
        "--prompts": {"type": _counts, "metavar": "N,N", "help": "lengths of prompts, or of texts; only these, and --rows"},
        "--steps": {
            "type": _count,
            "metavar": "N",
            "help": "of each number of rows, all rounds together: 1000 tell how steady they are",
        },
        "--url": {"help": "measure the server there instead of starting one"},
        **_load_flags(),
        "--tokens": {"type": _count, "metavar": "N", "help": "length of the long prompt, of the prefix, of the text at the most"},
        "--text": {"type": Path, "metavar": "FILE", "required": True, "help": "what to read; lines of --- between documents"},
    }


def _load_flags() -> dict[str, dict[str, Any]]:
    """What `bench http` may be asked."""
    length = {"type": _lengths, "metavar": "N[:N]"}
    return {
        "--kind": {"choices": ("generate", "embed"), "help": "what is asked for: streamed answers, or vectors of texts"},
        "--api": {
            "choices": ("completions", "openai", "native", "tei", "oip"),
            "help": "generate: completions (unless given), openai's chat, our own; embed: openai (unless given), native, tei, oip",
        },
        "--concurrency": {
            "type": _counts,
            "metavar": "N,N",
            "help": "clients who each wait for their answer (unless given: 1,8,32)",
        },
        "--rate": {"type": _rates, "metavar": "R,R", "help": "requests a second that wait for nobody, at random moments"},
        "--num-requests": {"type": _count, "metavar": "N", "help": "of each load (unless given: 4 a client that generates)"},
        "--seconds": {
            "type": float,
            "metavar": "S",
            "help": "for which each load sends (unless given: 10 to embed, 30 with --rate)",
        },
        "--prompt-tokens": length | {"help": "generate: length of the prompts, or from:to (unless given: 128)"},
        "--max-tokens": length | {"help": "generate: length of the answers, or from:to (unless given: 128)"},
        "--ignore-eos": {
            "action": argparse.BooleanOptionalAction,
            "help": "generate: go on after an end of text (unless given: yes)",
        },
        "--texts": {"type": _count, "metavar": "N", "help": "embed: texts of a request (unless given: 1)"},
        "--lengths": {
            "type": _text_lengths,
            "metavar": "N[:N]",
            "help": "embed: tokens of a text, or from:to, or lognormal:MEDIAN:HIGHEST (unless given: 128)",
        },
        "--warmup": {
            "type": int,
            "metavar": "N",
            "help": "requests before each load that are not counted (unless given: 1 a client)",
        },
        "--seed": {"type": int, "metavar": "N", "help": "of prompts, lengths and moments"},
        "--api-key": {"metavar": "KEY", "help": "sent as a bearer token"},
        "--slo-ttft-ms": {"type": float, "metavar": "MS", "help": "count requests whose first token came within this"},
        "--slo-itl-ms": {"type": float, "metavar": "MS", "help": "and whose later tokens took no longer than this on average"},
        "--against": {"metavar": "URL", "help": "another server, which takes turns with the first: what that is held against"},
    }


def _command(commands: Any, name: str, what: str, within: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", usage=f"armature {within}{name} [FLAGS]", allow_abbrev=False
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings", "Each is an environment variable too, the one in brackets; a flag wins.")
    for row in setting_rows():
        default = f" Default: {row.default}." if row.default else ""
        text = f"{row.description}{default} [{row.variable}]".replace("%", "%%")
        metavar = row.values.replace(" ", "_")
        group.add_argument(row.flag, dest=row.name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {min(rates):g}")
    return rates


def _lengths(text: str) -> tuple[int, int]:
    """`128` is from 128 to 128."""
    low, _, high = text.partition(":")
    lengths = (_count(low), _count(high or low))
    if lengths[0] > lengths[1]:
        raise argparse.ArgumentTypeError(f"{text} ends before it begins")
    return lengths


def _text_lengths(text: str) -> tuple[str, int, int]:
    """`40:512` is anything between, each as likely; `lognormal:40:512` is mostly near 40."""
    shape, numbers = ("lognormal", text.removeprefix("lognormal:")) if text.startswith("lognormal:") else ("even", text)
    return (shape, *_lengths(numbers))


def _complaint(unknown: list[str]) -> str:
    """Names the first flag that was not understood, or else the first word."""
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        return f"{word!r} is not understood. A checkpoint is given as --model {word}."
    known = [*(row.flag for row in setting_rows()), *_bench_flags(), "--help"]
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f"there is no flag {word}." + (f" Did you mean {near[0]}?" if near else "")
