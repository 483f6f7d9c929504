"""Measure what `auto` chose while a core was busy: `python -m tools.measure.busy_start --model DIR --cache-dir DIR`.

A process keeps one core busy while a start measures the machine, and ends then. Afterwards the chosen precision and
threads are measured against each precision with all cores, by turns in one run: tokens per second of one sequence and
of eight. The last column is the rate over the best of the others. Pack int8 and int4 into the cache folder first
(`armature pack`), or the first round does it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from app.hardware.probe.probe import probe
from app.server.prepare import calibrate, prepare
from app.settings import Settings
from tools.measure.small_engines import end_engines, measure_engines, start_engines

DEFAULT = "auto"


def main() -> None:
    """Print the choice, then a table."""
    asked = _arguments()
    if asked.child:
        _choose(asked)
        return
    os.environ["ARMATURE_CACHE_DIR"] = asked.cache_dir
    cores = [core.cpu_ids[0] for core in probe().cores if core.kind == "performance"]
    with _busy(cores[-1]):
        command = [sys.executable, "-m", "tools.measure.busy_start", "--child", *sys.argv[1:]]
        chosen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(f"chosen while CPU {cores[-1]} was busy: {chosen['precision']}, {chosen['threads']} threads", flush=True)
    for line in chosen["reasons"]:
        print(f"    {line}", flush=True)
    sides = {
        DEFAULT: (chosen["precision"], chosen["threads"]),
        **{name: (name, len(cores)) for name in asked.precisions.split(",")},
    }
    engines = {
        side: start_engines(asked.model, precision, [cores[:threads]]) for side, (precision, threads) in sides.items()
    }
    try:
        print("| sequences | " + " | ".join(sides) + " | auto over the best |\n|" + "---|" * (len(sides) + 2))
        for sequences in (1, 8):
            rates = dict.fromkeys(sides, 0.0)
            for _ in range(asked.rounds):
                for side in sides:
                    found = measure_engines(engines[side], sequences, prompt=32, steps=asked.steps)
                    rates[side] = max(rates[side], found.tokens_per_second)
            print(_row(sequences, rates), flush=True)
    finally:
        for each in engines.values():
            end_engines(each)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache-dir", required=True, help="packed weights; a calibration there is not read")
    parser.add_argument("--precisions", default="fp32,bf16,int8,int4", help="those to compare; default: all")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a round; default 40")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the fastest counts; default 3")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(sequences: int, rates: Mapping[str, float]) -> str:
    best = max(rate for side, rate in rates.items() if side != DEFAULT)
    cells = " | ".join(f"{rate:,.0f}" for rate in rates.values())
    return f"| {sequences} | {cells} | {rates[DEFAULT] / best:.2f} |"


@contextmanager
def _busy(cpu: int) -> Iterator[None]:
    """Keep a CPU busy inside."""
    neighbour = subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def _choose(asked: argparse.Namespace) -> None:
    """Print what a start chooses now, as JSON."""
    prepared = prepare(Settings(model=asked.model, calibrate="on"))
    os.environ.update(prepared.plan.environment())
    plan = calibrate(prepared, lambda stage: None).plan
    reasons = [plan.decisions["precision"].reason, plan.decisions["threads"].reason]
    print(json.dumps({"precision": plan.weights.precision, "threads": plan.cpu.threads, "reasons": reasons}))


if __name__ == "__main__":
    main()
