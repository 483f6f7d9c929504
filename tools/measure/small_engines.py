"""Compare few engines of many threads with many of few: `python -m tools.measure.small_engines --model DIR`.

`--engines 1x2,2x1` compares one engine of two threads with two of one thread each. Every engine is a process on cores of
its own; those of one variant compute at the same time, and the variants take turns. The sequences are divided evenly.
The output has, for each number of sequences, the generated tokens per second of all engines together, the median and
the 99th percentile of a step (the time from token to token), and the seconds until all prompts are read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.hardware.probe.probe import probe
from app.messages import Abort, Generate, SamplingParams
from app.server.prepare import prepare
from app.settings import Settings


def main() -> None:
    """Print a row for each variant and number of sequences."""
    asked = _arguments()
    if asked.child:
        _compute(asked)
        return
    cores = [core.cpu_ids[0] for core in probe().cores if core.kind == "performance"]
    variants = {
        name: start_engines(asked.model, asked.precision, _divided(name, cores)) for name in asked.engines.split(",")
    }
    print("| engines × threads | sequences | tokens/s | step p50 | step p99 | prompts |\n|---|---|---|---|---|---|")
    try:
        for sequences in map(int, asked.sequences.split(",")):
            rounds = [
                {
                    name: measure_engines(engines, sequences, asked.prompt, asked.steps)
                    for name, engines in variants.items()
                }
                for _ in range(asked.rounds)
            ]
            for name in variants:
                best = max((each[name] for each in rounds), key=lambda found: found.tokens_per_second)
                print(f"| {name} | {sequences} | {best}", flush=True)
    finally:
        for engines in variants.values():
            end_engines(engines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--engines", default="1x2,2x1", help="variants: ENGINESxTHREADS; default 1x2,2x1")
    parser.add_argument("--sequences", default="2,8,32", help="sequences of all engines together; default 2,8,32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt; default 128")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of a round; default 200")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the fastest counts; default 3")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of the engines of one variant, which computed at the same time."""

    tokens_per_second: float
    step_seconds: Sequence[float]
    prompt_seconds: float

    def __str__(self) -> str:
        middle, high = statistics.median(self.step_seconds), statistics.quantiles(self.step_seconds, n=100)[98]
        times = f"{middle * 1e3:.2f} ms | {high * 1e3:.2f} ms"
        return f"{self.tokens_per_second:,.0f} | {times} | {self.prompt_seconds:.2f} s |"


def _divided(name: str, cores: Sequence[int]) -> list[Sequence[int]]:
    """Return the cores of each engine of a variant such as `2x4`."""
    engines, threads = (int(part) for part in name.split("x"))
    if engines * threads > len(cores):
        sys.exit(f"{name} needs {engines * threads} cores, and there are {len(cores)}")
    return [cores[number * threads : (number + 1) * threads] for number in range(engines)]


def start_engines(model: str, precision: str, cores: Sequence[Sequence[int]]) -> list[subprocess.Popen[str]]:
    """Start one engine for each list of CPUs, with a thread on each of them, and wait until all are loaded."""
    command = [sys.executable, "-m", "tools.measure.small_engines", "--model", model, "--precision", precision]
    started = []
    for own in cores:
        pinned = ["taskset", "-c", ",".join(map(str, own)), *command, "--child", str(len(own))]
        started.append(subprocess.Popen(pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for engine in started:
        assert engine.stdout is not None, "it has a pipe"
        assert engine.stdout.readline() == "ready\n", f"an engine in {precision} did not start"
    return started


def end_engines(engines: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes."""
    for engine in engines:
        engine.kill()
        engine.wait()


def measure_engines(engines: Sequence[subprocess.Popen[str]], sequences: int, prompt: int, steps: int) -> Measured:
    """Divide the sequences evenly, and let all engines compute at the same time."""
    job = {"sequences": max(1, sequences // len(engines)), "prompt": prompt, "steps": steps}
    for engine in engines:
        assert engine.stdin is not None, "it has a pipe"
        engine.stdin.write(json.dumps(job) + "\n")
        engine.stdin.flush()
    found: list[dict[str, Any]] = []
    for engine in engines:
        assert engine.stdout is not None, "it has a pipe"
        found.append(json.loads(engine.stdout.readline()))
    return Measured(
        sum(job["sequences"] * steps / sum(each["steps"]) for each in found),
        [seconds for each in found for seconds in each["steps"]],
        max(each["prompt"] for each in found),
    )


def _compute(asked: argparse.Namespace) -> None:
    """Be one engine: measure a job for each line of standard input."""
    given = Settings(
        model=asked.model, precision=asked.precision, threads=asked.child, calibrate="off", speculation="off"
    )
    prepared = prepare(given)
    os.environ.update(prepared.plan.environment())
    from app.engine.build import BuildRequest, build

    engine = build(BuildRequest(prepared.checkpoint, prepared.plan))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_job(engine, **json.loads(line))), flush=True)


def _job(engine: Any, sequences: int, prompt: int, steps: int) -> dict[str, Any]:
    """Return the seconds of decode steps in which all sequences compute, and those until they do."""
    params = SamplingParams(max_tokens=2 * steps + 64, ignore_eos=True)
    names = {f"{number}" for number in range(sequences)}
    for name in names:
        ids = tuple(random.randrange(100, 1000) for _ in range(prompt))  # no two share a prefix
        engine.add(Generate(name, ids, params, 0.0))
    began, waiting = time.perf_counter(), set(names)
    while waiting:
        waiting -= {event.request_id for event in engine.step()}
    started, taken = time.perf_counter() - began, []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    for name in names:
        engine.abort(Abort(name))
    return {"steps": taken, "prompt": started}


if __name__ == "__main__":
    main()
