"""Measure our engine and others in turns: `python -m tools.measure.engines --side ours=PYTHON:DIR --side ...`.

The figures of docs/performance.md come from it. Each side is a process run by the given interpreter. It loads its model
and is stopped while another is measured. All sides get token ids, sample greedily, produce no text and use their own
scheduler. Ratios are the first side's speed divided by another's, taken round by round. Encoders (`ours_encoder`,
`openvino_encoder`) get texts: `--workloads 8x128,8x512`. Two native libraries are two sides `ours/NAME`, one with
`ARMATURE_NATIVE_LIBRARY=FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from tools.peers.sides import KINDS, Side, SideSpec
from tools.peers.turns import Taken, Turn

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128
WORKLOADS = ("prefill", "1", "8", "16", "32")

Rates = dict[str, dict[str, list[float]]]  # by workload and side: tokens per second of each round


@dataclass(frozen=True, slots=True)
class Workload:
    """`prefill`, a number of sequences that decode together, or `8x128`: 8 texts of 128 tokens for an encoder."""

    name: str
    tokens: int

    @property
    def texts(self) -> tuple[int, int] | None:
        rows, cross, tokens = self.name.partition("x")
        return (int(rows), int(tokens)) if cross else None

    def turn(self, seed: int) -> Turn:
        if self.texts is not None:
            return Turn(*self.texts, 1, seed)
        if self.name == "prefill":
            return Turn(1, PREFILL_TOKENS, 1, seed)
        return Turn(int(self.name), PROMPT_TOKENS, self.tokens, seed)

    def rate(self, taken: Taken) -> float:
        """Return tokens per second until the first token, or decoded by all rows, or texts per second."""
        if self.texts is not None:
            return self.texts[0] / taken.seconds
        return (PREFILL_TOKENS if self.name == "prefill" else taken.tokens) / taken.seconds

    def __str__(self) -> str:
        if self.texts is not None:
            return f"{self.texts[0]} texts of {self.texts[1]}"
        return f"prefill {PREFILL_TOKENS}" if self.name == "prefill" else f"decode ×{self.name}"


def main() -> int:
    """Print progress to stderr, and to stdout a table and, in the last line, JSON. Ctrl-C keeps complete rounds."""
    arguments = _arguments()
    workloads = [Workload(name, arguments.tokens) for name in arguments.workloads.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the sides end too
    sides: list[Side] = []
    abouts: dict[str, dict[str, Any]] = {}
    rates: Rates = {str(workload): {spec.name: [] for spec in arguments.side} for workload in workloads}
    complete = True
    try:
        for spec in arguments.side:
            sides.append(Side(spec, arguments.threads))
            abouts[spec.name] = sides[-1].wait_until_ready()
            _say(f"{spec.name}: ready after {abouts[spec.name]['load_seconds']:.1f} s")
        _warm_up(sides, workloads, abouts)
        for number in range(arguments.rounds):
            _round(number, sides, workloads, rates)
    except KeyboardInterrupt:
        complete = False
    finally:
        for side in sides:
            side.end()
    _report(abouts, rates, arguments.threads, complete)
    return 0 if complete else 128 + signal.SIGINT


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--side",
        action="append",
        required=True,
        type=_side,
        metavar="KIND[/LABEL]=INTERPRETER:MODEL[,name=value...]",
        help=f"{', '.join(KINDS)}; names in capitals are environment variables, others are options of the side",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="compute threads of each side; use one per physical core",
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        type=_names,
        help="prefill, numbers of rows to decode, or texts x tokens as in 8x128",
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded by all rows together")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    names = [spec.name for spec in arguments.side]
    if len(set(names)) < len(names):
        parser.error("two sides have one name: tell them apart as KIND/LABEL")
    return arguments


def _side(text: str) -> SideSpec:
    try:
        return SideSpec.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> str:
    for name in text.split(","):
        if not re.fullmatch(r"prefill|[1-9]\d*(x[1-9]\d*)?", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is neither prefill nor a number of rows, nor texts of tokens as 8x128"
            )
    return text


def _warm_up(sides: list[Side], workloads: list[Workload], abouts: dict[str, dict[str, Any]]) -> None:
    """Run each workload once, so that nothing is compiled or allocated later.

    Equal first tokens show that the sides compute the same model. In BF16 nearly all first tokens are equal. With
    random weights in four bits few are, because their logits are close together.
    """
    firsts: list[list[int]] = []
    for side in sides:
        ids = [row[0] for seed, workload in enumerate(workloads) for row in side.take(workload.turn(seed)).ids]
        firsts = firsts or [ids]
        equal = sum(mine == theirs for mine, theirs in zip(firsts[0], ids, strict=True))
        abouts[side.spec.name] |= {"first_tokens_equal": equal / len(ids), "resident_bytes": side.resident_bytes()}
        _say(f"{side.spec.name}: warm, {equal} of {len(ids)} first tokens as {sides[0].spec.name} has them")


def _round(number: int, sides: list[Side], workloads: list[Workload], rates: Rates) -> None:
    """Measure one round. The first side changes, so that drift of the machine does not affect one side only."""
    first = number % len(sides)
    measured: Rates = {str(workload): {} for workload in workloads}
    for at, workload in enumerate(workloads):
        for side in sides[first:] + sides[:first]:
            rate = workload.rate(side.take(workload.turn(seed=(1 + number) * len(workloads) + at)))
            measured[str(workload)][side.spec.name] = [rate]
            _say(f"round {number + 1}: {workload}, {side.spec.name} {rate:.1f}/s")
    for name, of_sides in measured.items():
        for side_name, values in of_sides.items():
            rates[name][side_name] += values


def _report(abouts: dict[str, dict[str, Any]], rates: Rates, threads: int, complete: bool) -> None:
    names = list(next(iter(rates.values())))
    medians = {
        work: {name: statistics.median(values) for name, values in of.items() if values} for work, of in rates.items()
    }
    ratios = {
        work: {
            name: statistics.median(ours / other for ours, other in zip(of[names[0]], of[name], strict=True))
            for name in of
        }
        for work, of in rates.items()
        if of[names[0]]
    }
    for name, about in abouts.items():
        held, weights = about.get("resident_bytes", 0) / 1e6, about["bytes_per_token"] / 1e6
        print(f"{name}: {weights:.0f} MB of weights a token, {held:.0f} MB resident; {about['about']}")
    for work, of_sides in ratios.items():
        for name, ratio in of_sides.items():
            beside = "" if name == names[0] else f"  {names[0]} is {ratio:.2f} times as fast"
            unit = "texts/s" if " texts of " in work else "tok/s"
            print(f"{work:15} {name:24} {medians[work][name]:8.1f} {unit}{beside}")
    result = {"threads": threads, "complete": complete, "sides": abouts, "tokens_per_second": medians}
    print(json.dumps({**result, "rounds": rates, "first_over": ratios}))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
