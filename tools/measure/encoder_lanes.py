"""Measure encoder steps in lanes against undivided steps: `python -m tools.measure.encoder_lanes --model DIR`.

A lane is a group of texts that one thread takes through all layers. All variants compute the same texts in turns.
`--beside 3` starts a process that computes for three of every ten milliseconds, as an event loop under load does. The
output has the minimum and the median time of each variant and, in brackets, how many times faster it is than the
first. The first variant divides every operation among all threads; `64x4` has lanes of at least 64 tokens and at most
four per thread.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.engine.encoder.batching import EncodeState, TextSpan
from app.engine.encoder.cpu_runner import EncoderRunner, LanePlanner
from app.messages import Encode, Text
from app.server.prepare import Prepared, prepare
from app.settings import Settings
from armature_bench.http.workload import LogNormalLengths

TOGETHER = "division"
WAYS = f"{TOGETHER},64x1,64x2,64x4,32x4,128x2"
STEPS = "16x32,8x64,4x128,2x256,8x128,mixed:256,mixed:512,mixed:1024"
NEIGHBOUR = """
import sys, time
wants = float(sys.argv[1])
while True:
    ends = time.perf_counter() + wants
    while time.perf_counter() < ends:
        pass
    time.sleep(0.01 - wants)
"""


def main() -> None:
    """Print a line for each step as it finishes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the neighbour process ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default=STEPS, help="TEXTSxTOKENS, or mixed:TOKENS of log-normal lengths around 40")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds for each step, all variants together")
    parser.add_argument(
        "--beside",
        type=float,
        default=0.0,
        metavar="MS",
        help="milliseconds of every 10 ms that a neighbour process computes",
    )
    asked = parser.parse_args()
    settings = Settings(
        model=asked.model, precision=asked.precision, threads=asked.threads, calibrate="off", max_batch_tokens=2048
    )
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    ways = {name: way(name) for name in asked.ways.split(",")}
    runner = built(prepared)
    with neighbour(asked.beside / 1e3):
        for name in asked.steps.split(","):
            spans = list(steps(name))
            taken = turns(runner, spans, ways, asked.seconds)
            print(
                f"{name:>12}", "   ".join(told(each, taken[TOGETHER], key) for key, each in taken.items()), flush=True
            )


def way(name: str) -> LanePlanner:
    """Return a planner with lanes of at least N tokens and at most M lanes per thread, from the text `NxM`."""
    least, _, most = ("2097152", "", "1") if name == TOGETHER else name.partition("x")
    return LanePlanner(min_lane_tokens=int(least), max_lanes_per_thread=int(most))


def built(prepared: Prepared) -> EncoderRunner:
    """Build the runner as a server does."""
    from app.engine.build import BuildRequest
    from app.engine.encoder.build import build_encoder_engine
    from app.weights.open import require_checkpoint

    runner = build_encoder_engine(BuildRequest(require_checkpoint(prepared.checkpoint), prepared.plan)).runner
    if runner.replay.reason:
        sys.exit(f"steps are eager, so there are no lanes: {runner.replay.reason}")
    return runner


def steps(name: str) -> Iterator[list[TextSpan]]:
    """Yield the texts of one step, or of several if their lengths are drawn."""
    kind, _, tokens = name.partition(":")
    if kind == "mixed":
        drawn = random.Random(1)
        for _ in range(20):
            lengths: list[int] = []
            while sum(lengths) < int(tokens):
                lengths.append(min(LogNormalLengths(40, 512).draw(drawn), int(tokens) - sum(lengths)))
            yield spans_of(lengths)
    else:
        texts, _, length = name.partition("x")
        yield spans_of([int(length)] * int(texts))


def spans_of(lengths: Sequence[int]) -> list[TextSpan]:
    texts = tuple(Text(tuple(100 + at for at in range(length))) for length in lengths)
    return EncodeState.from_message(Encode("lanes", texts, ("embedding",), arrived_at=0.0)).spans()


def turns(
    runner: EncoderRunner, spans: Sequence[list[TextSpan]], ways: dict[str, LanePlanner], seconds: float
) -> dict[str, list[float]]:
    """Return the mean seconds of a step for each variant, one value for each turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken[TOGETHER]) < 3:
        for name, lanes in ways.items():
            runner.replay.planner = lanes
            inside = 0.0
            for step in spans:
                runner.run(step)
                inside += runner.model_seconds
            taken[name].append(inside / len(spans))
    return taken


def told(seconds: Sequence[float], division: Sequence[float], name: str) -> str:
    least, middle = min(seconds) * 1e3, statistics.median(seconds) * 1e3
    ratios = f"{min(division) * 1e3 / least:.2f}, {statistics.median(division) * 1e3 / middle:.2f}"
    return f"{name} {least:.2f} / {middle:.2f} ms" + ("" if seconds is division else f" ({ratios})")


@contextmanager
def neighbour(seconds: float) -> Iterator[None]:
    """Run a process that computes for `seconds` of every ten milliseconds; none for 0."""
    if not seconds:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(seconds)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
