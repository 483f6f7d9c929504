"""What benches may be asked beside the settings, as argparse takes it, and how such values are read from text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def bench_flags() -> dict[str, dict[str, Any]]:
    """What benches may be asked beside the settings, as argparse takes it."""
    return {
        "--json": {"type": Path, "metavar": "PATH", "help": "write the JSON object there as well"},
        "--rounds": {"type": _count, "metavar": "N", "help": "how often to measure"},
        "--rows": {
            "type": _counts,
            "metavar": "N,N",
            "help": "sequences that decode together, or texts or rows of a batch; only these, and --prompts",
        },
        "--prompts": {"type": _counts, "metavar": "N,N", "help": "lengths of prompts, or of texts; only these, and --rows"},
        "--steps": {
            "type": _count,
            "metavar": "N",
            "help": "of each number of rows, all rounds together: 1000 tell how steady they are",
        },
        "--url": {"help": "measure the server there instead of starting one"},
        **_load_flags(),
        **_compare_flags(),
        "--tokens": {"type": _count, "metavar": "N", "help": "length of the long prompt, of the prefix, of the text at the most"},
        "--text": {"type": Path, "metavar": "FILE", "required": True, "help": "what to read; lines of --- between documents"},
    }


def _load_flags() -> dict[str, dict[str, Any]]:
    """What `bench http` may be asked."""
    length = {"type": _lengths, "metavar": "N[:N]"}
    return {
        "--kind": {
            "choices": ("generate", "embed", "infer"),
            "help": "what is asked for: streamed answers, vectors of texts, or rows of an exported program",
        },
        "--api": {
            "choices": ("completions", "openai", "native", "tei", "oip"),
            "help": "generate: completions (unless given), openai's chat, ours; embed: openai (unless given), native, tei, oip; infer: oip",
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
            "help": "for which each load sends (unless given: 10 to embed or infer, 30 with --rate; compare: 8)",
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
            "help": "embed: tokens of a text, or from:to, or lognormal:MEDIAN:HIGHEST (unless given: 128); infer: free dimensions (16)",
        },
        "--batch": {"type": _count, "metavar": "N", "help": "infer: rows of a request (unless given: 1)"},
        "--below": {"type": _count, "metavar": "N", "help": "infer: whole numbers of inputs lie below this (unless given: 2)"},
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


def _compare_flags() -> dict[str, dict[str, Any]]:
    """What `bench compare` may be asked."""
    return {
        "results": {
            "type": Path,
            "nargs": "*",
            "metavar": "RESULT",
            "help": "files of results that were measured before: nothing is measured, they are held against each other",
        },
        "--name": {"metavar": "NAME", "help": "what this machine is called in reports (unless given: as it calls itself)"},
        "--instance": {"metavar": "ROW", "help": "the row of the price table that this machine is, for instance c7g.4xlarge"},
        "--output": {
            "type": Path,
            "metavar": "FILE",
            "help": "the result file (unless given: armature-NAME-MODEL-PRECISION.json here); one that is there is replaced",
        },
        "--report": {"type": Path, "metavar": "DIR", "help": "of RESULTs: write report.html and its plots there"},
        "--force": {"action": "store_true", "help": "of RESULTs: even of different models"},
    }


def cost_flags() -> dict[str, dict[str, Any]]:
    """What `tco` may be asked."""
    return {
        "results": {"type": Path, "nargs": "*", "metavar": "RESULT", "help": "files that `armature bench compare` wrote"},
        "--target": {"metavar": "N/UNIT", "help": "what has to be served: 10000/s, 600/min, 1e6/day samples, or 5000tok/s"},
        "--p99-ms": {"type": float, "metavar": "MS", "help": "only as much load as keeps 99 of 100 requests within this"},
        "--instances": {"type": Path, "metavar": "FILE", "help": "rows of prices that come on top of ours, or in their place"},
        "--published": {"action": "store_true", "help": "the published comparison on BERT-Large, worked out from its inputs"},
        "--json": {"action": "store_true", "help": "print one JSON object"},
    }


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
