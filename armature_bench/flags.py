"""The commands of `armature bench` with their flags, those of `armature tco`, and parsers of their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature_bench.published.rows import TOPICS
from armature_bench.published.runs import DEFAULT_SECONDS

TORCH_DTYPES = ("fp32", "bf16")  # those of bench.engine.compiled, which imports torch


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """One `armature bench` command.

    `flags` maps each flag from `bench_flags` that the command accepts to its default, or to None if it has none.
    """

    description: str
    flags: Mapping[str, Any]


# A new bench needs one entry here and one in `run.py` (measured in this process) or in `http/load.py`.
BENCHES: Mapping[str, BenchCommand] = {
    "kernels": BenchCommand(
        "matrix products and decode attention alone, by weight format and number of rows, compared with this machine's limits",
        {"--rounds": 5},
    ),
    "engine": BenchCommand(
        "the engine alone, step by step, compared with this machine's memory bandwidth and compute limits",
        {"--rounds": 3, "--rows": None, "--prompts": None, "--contexts": None, "--steps": None, "--beam-width": None},
    ),
    "quality": BenchCommand(
        "perplexity of a text at each precision, and how often the most likely token is FP32's; for an encoder, cosines with FP32",
        {"--text": None, "--tokens": None, "--texts": None, "--peer": None, "--peer-python": None},
    ),
    "speculation": BenchCommand(
        "speed-up by speculative decoding at given acceptance rates (set artificially), with one greedy sequence; also with"
        " a draft model if draft_model is set",
        {"--rounds": 5},
    ),
    "eager": BenchCommand(
        "decode steps run by the Python interpreter compared with recorded native steps, and with torch.compile",
        {"--rounds": 5, "--rows": None, "--dtypes": None},
    ),
    "recording": BenchCommand(
        "the cost of recording the duration of each step and the cause of slow steps", {"--rounds": 5}
    ),
    "http": BenchCommand(
        "a server under load that generates, embeds or infers: Armature, or any server with one of the same APIs",
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
            "--image": None,
            "--ignore-eos": None,
            "--texts": None,
            "--lengths": None,
            "--batch": None,
            "--below": None,
            "--warmup": None,
            "--seed": 0,
            "--api-key": None,
            "--slo": None,
            "--slo-ttft-ms": None,
            "--slo-itl-ms": None,
            "--against": None,
            "--rounds": 1,
            "--report": None,
        },
    ),
    "compare": BenchCommand(
        "measure this machine with one model and write a result file; or, with RESULTs, compare machines in one report",
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
    "published": BenchCommand(
        "figures that others published beside those of this machine: BERT-Large, a Llama of 110M on one thread, int4 over"
        " FP32, recorded over eager steps, newer over older instructions",
        {"--only": None, "--quick": None, "--folder": None, "--seconds": DEFAULT_SECONDS, "--report": None},
    ),
    "start": BenchCommand("seconds from the start of the process to a first token", {"--rounds": 5}),
    "itl": BenchCommand(
        "inter-token latency of running streams while a long prompt arrives",
        {"--rounds": 5, "--tokens": 2000, "--url": None},
    ),
    "prefix": BenchCommand(
        "time to first token of a second request that shares a long prefix",
        {"--rounds": 5, "--tokens": 1000, "--url": None},
    ),
    "pictures": BenchCommand(
        "time to first token of two questions about one picture, and gaps of running streams while pictures arrive",
        {"--rounds": 5, "--image": (448, 448), "--url": None},
    ),
    "memory": BenchCommand(
        "resident memory, compared with the size of the weights and the KV cache in use", {"--rounds": 5}
    ),
    "wait": BenchCommand(
        "a server's estimates of its capacity and of the wait for a first token, compared with measured values",
        {"--rounds": 5, "--url": None},
    ),
    "overhead": BenchCommand(
        "the share of wall time that is not spent in the model, at decode ×8 over HTTP, and the server's time for a "
        "streamed token and a short request",
        {"--rounds": 5, "--url": None},
    ),
}


def bench_flags() -> dict[str, dict[str, Any]]:
    """Return the flags that benches accept in addition to the settings.

    A key such as `http --report` is that flag of one bench, where it differs from the others'.
    """
    return {
        "--json": {"type": Path, "metavar": "PATH", "help": "also write the JSON object to this file"},
        "--rounds": {"type": _count, "metavar": "N", "help": "number of measurement rounds"},
        "--rows": {
            "type": _counts,
            "metavar": "N,N",
            "help": "batch sizes: sequences that decode together, texts or rows; measure only these and --prompts",
        },
        "--prompts": {
            "type": _counts,
            "metavar": "N,N",
            "help": "lengths of prompts or texts; measure only these and --rows",
        },
        "--contexts": {
            "type": _counts,
            "metavar": "N,N",
            "help": "tokens before the decoded ones: one sequence decodes after each",
        },
        "--steps": {
            "type": _count,
            "metavar": "N",
            "help": "steps for each batch size over all rounds; 1000 or more also show how much they vary",
        },
        "--beam-width": {
            "type": _count,
            "metavar": "N",
            "help": "a beam search of N beams, whose steps should take at most 100 ms; measure only this, --rows and --prompts",
        },
        "--dtypes": {
            "type": _torch_dtypes,
            "metavar": "DTYPE,DTYPE",
            "help": f"dtypes of torch's own steps, eager and compiled (default {','.join(TORCH_DTYPES)})",
        },
        "--url": {"help": "measure the running server at this URL instead of starting one"},
        **_load_flags(),
        **_compare_flags(),
        **_published_flags(),
        "--tokens": {
            "type": _count,
            "metavar": "N",
            "help": "length of the long prompt or the prefix; at most this many tokens of the text",
        },
        "--text": {
            "type": Path,
            "metavar": "FILE",
            "help": "the text, lines of --- separate documents; default: 4,096 tokens of Python's documentation",
        },
        "--peer": {
            "choices": ("llama.cpp",),
            "help": "also measure this engine's formats of the same weights (packages gguf and llama-cpp-python)",
        },
        "--peer-python": {
            "metavar": "PYTHON",
            "help": "interpreter of the environment that has llama-cpp-python (default: this one)",
        },
    }


def _load_flags() -> dict[str, dict[str, Any]]:
    return _pattern_flags() | _request_flags() | _run_flags()


def _pattern_flags() -> dict[str, dict[str, Any]]:
    return {
        "--kind": {
            "choices": ("generate", "embed", "infer"),
            "help": "kind of request: streamed answers, embeddings of texts, or rows of an exported program",
        },
        "--api": {
            "choices": ("completions", "openai", "native", "tei", "oip"),
            "help": "generate: completions (default), openai (chat), native; embed: openai (default), native, tei, oip; infer: oip",
        },
        "--concurrency": {
            "type": _counts,
            "metavar": "N,N",
            "help": "concurrent clients, each waiting for its answer (default 1,8,32)",
        },
        "--rate": {
            "type": _rates,
            "metavar": "R,R",
            "help": "requests per second, sent at random times without waiting for answers",
        },
        "--num-requests": {
            "type": _count,
            "metavar": "N",
            "help": "requests per load (default when generating: 4 per client)",
        },
        "--seconds": {
            "type": float,
            "metavar": "S",
            "help": "duration of each load (default: 10 to embed or infer, 30 with --rate; compare: 8)",
        },
    }


def _request_flags() -> dict[str, dict[str, Any]]:
    length = {"type": _lengths, "metavar": "N[:N]"}
    return {
        "--prompt-tokens": length | {"help": "generate: length of the prompts, or from:to (default 128)"},
        "--max-tokens": length | {"help": "generate: length of the answers, or from:to (default 128)"},
        "--image": {
            "type": _size,
            "metavar": "WxH",
            "help": "a picture of this size in each request, a new one each time (with --api openai)",
        },
        "--ignore-eos": {
            "action": argparse.BooleanOptionalAction,
            "help": "generate: continue after an end-of-text token (default yes)",
        },
        "--texts": {
            "type": _count,
            "metavar": "N",
            "help": "embed: texts per request (default 1); quality of an encoder: number of texts (default 1000)",
        },
        "--lengths": {
            "type": _text_lengths,
            "metavar": "N[:N]",
            "help": "embed: tokens per text, or from:to, or lognormal:MEDIAN:HIGHEST (default 128); infer: free dimensions (default 16)",
        },
        "--batch": {"type": _count, "metavar": "N", "help": "infer: rows per request (default 1)"},
        "--below": {"type": _count, "metavar": "N", "help": "infer: integer inputs are below this number (default 2)"},
    }


def _run_flags() -> dict[str, dict[str, Any]]:
    return {
        "--warmup": {
            "type": int,
            "metavar": "N",
            "help": "warm-up requests before each load, not counted (default 1 per client)",
        },
        "--seed": {"type": int, "metavar": "N", "help": "random seed of prompts, lengths and send times"},
        "--api-key": {"metavar": "KEY", "help": "sent as a bearer token"},
        "--slo": {
            "choices": ("turn-taking",),
            "help": "a named objective; turn-taking: the first token within 200 ms, as people answer each other",
        },
        "--slo-ttft-ms": {
            "type": float,
            "metavar": "MS",
            "help": "count requests whose first token arrived within this time",
        },
        "--slo-itl-ms": {
            "type": float,
            "metavar": "MS",
            "help": "and whose later tokens took at most this long on average",
        },
        "http --report": {
            "type": Path,
            "metavar": "FILE",
            "help": "also write the figures with plots to this file, as one HTML page",
        },
        "--against": {"metavar": "URL", "help": "another server to compare with, measured in turns with the first"},
    }


def _compare_flags() -> dict[str, dict[str, Any]]:
    return {
        "results": {
            "type": Path,
            "nargs": "*",
            "metavar": "RESULT",
            "help": "result files to compare; nothing is measured",
        },
        "--name": {"metavar": "NAME", "help": "name of this machine in reports (default: its processor)"},
        "--instance": {"metavar": "ROW", "help": "row of the price table for this machine, for instance c7g.4xlarge"},
        "--output": {
            "type": Path,
            "metavar": "FILE",
            "help": "the result file (default: armature-NAME-MODEL-PRECISION.json in this folder); an existing one is replaced",
        },
        "--report": {
            "type": Path,
            "metavar": "DIR",
            "help": "with RESULTs: write report.html and its plots to this folder",
        },
        "--force": {"action": "store_true", "help": "with RESULTs: compare them even if the models differ"},
    }


def _published_flags() -> dict[str, dict[str, Any]]:
    return {
        "--only": {
            "type": lambda text: tuple(text.split(",")),
            "metavar": "TOPIC,TOPIC",
            "help": f"measure these only: {', '.join(TOPICS)}",
        },
        "--quick": {"action": "store_true", "help": "shorter texts and smaller models"},
        "--folder": {
            "type": Path,
            "metavar": "DIR",
            "help": "folder of the models by name; those that are missing are written there with random weights"
            " (default: a temporary folder, removed at the end)",
        },
        "published --seconds": {"type": float, "metavar": "S", "help": "time limit of one measurement"},
        "published --report": {
            "type": Path,
            "metavar": "FILE",
            "help": "also write the table to this file, in Markdown",
        },
    }


def cost_flags() -> dict[str, dict[str, Any]]:
    return {
        "results": {
            "type": Path,
            "nargs": "*",
            "metavar": "RESULT",
            "help": "result files written by `armature bench compare`",
        },
        "--target": {"metavar": "N/UNIT", "help": "load to serve: 10000/s, 600/min, 1e6/day samples, or 5000tok/s"},
        "--p99-ms": {"type": float, "metavar": "MS", "help": "highest p99 of a request; only loads within it are used"},
        "--instances": {
            "type": Path,
            "metavar": "FILE",
            "help": "price table that extends or replaces families of the shipped one",
        },
        "--published": {
            "action": "store_true",
            "help": "a published comparison on BERT-Large, computed again from its inputs and reviewed",
        },
        "--machine": {
            "action": "append",
            "default": [],
            "metavar": "NAME=RATE,P99_MS,WATTS,PRICE",
            "help": "a machine by its figures, without a result file; '-' for one that is not known; repeatable",
        },
        "--hours-a-day": {"type": float, "default": 24, "metavar": "H", "help": "hours served and paid (default: 24)"},
        "--days-a-year": {"type": float, "default": 365, "metavar": "D", "help": "days served and paid (default: 365)"},
        "--json": {"action": "store_true", "help": "print one JSON object"},
    }


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _torch_dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in TORCH_DTYPES]:
        raise argparse.ArgumentTypeError(f"there is {', '.join(TORCH_DTYPES)}, not {unknown[0]}")
    return names


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return _count(width), _count(height)


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {min(rates):g}")
    return rates


def _lengths(text: str) -> tuple[int, int]:
    """Parse `128` (from 128 to 128) or `64:128`."""
    low, _, high = text.partition(":")
    lengths = (_count(low), _count(high or low))
    if lengths[0] > lengths[1]:
        raise argparse.ArgumentTypeError(f"{text} ends before it begins")
    return lengths


def _text_lengths(text: str) -> tuple[str, int, int]:
    """Parse `40:512` (uniform between the two) or `lognormal:40:512` (mostly near 40)."""
    shape, numbers = ("lognormal", text.removeprefix("lognormal:")) if text.startswith("lognormal:") else ("even", text)
    return (shape, *_lengths(numbers))
