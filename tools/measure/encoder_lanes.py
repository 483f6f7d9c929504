"""Steps of an encoder in lanes beside the same steps divided operation by operation: `python -m tools.measure.encoder_lanes --model DIR`.

All ways take turns, step by step, on the same texts. With `--beside 3` another process wants a core for three of every ten milliseconds,
as an event loop does under load. Of each way the least and the median of its times; in brackets the division's over it, above 1 where it is
quicker. The first way divides every operation; `64x4` has lanes of at least 64 tokens, at most four for each thread.
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

from app.bench.http.workload import LogNormalLengths
from app.engine.encoder.batching import (
    EncodeState,
    TextSpan,
)
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.encoder.sharding import LanePlanner
from app.messages import (
    Encode,
    Text,
)
from app.server.prepare import (
    Prepared,
    prepare,
)
from app.settings import Settings

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
    """A line for each step as it is done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the neighbour ends too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default=STEPS, help="TEXTSxTOKENS, or mixed:TOKENS of log-normal lengths around 40")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each step, all ways together")
    parser.add_argument(
        "--beside", type=float, default=0.0, metavar="MS", help="what a neighbour computes of every 10 ms"
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
    """Lanes of so many tokens at least, at most so many a thread."""
    least, _, most = ("2097152", "", "1") if name == TOGETHER else name.partition("x")
    return LanePlanner(min_lane_tokens=int(least), max_lanes_per_thread=int(most))


def built(prepared: Prepared) -> EncoderRunner:
    """As serving has it."""
    from app.engine.build import BuildRequest
    from app.engine.encoder.build import build_encoder_engine
    from app.weights.open import require_checkpoint

    runner = build_encoder_engine(BuildRequest(require_checkpoint(prepared.checkpoint), prepared.plan)).runner
    if runner.replay.reason:
        sys.exit(f"steps are eager, so there are no lanes: {runner.replay.reason}")
    return runner


def steps(name: str) -> Iterator[list[TextSpan]]:
    """Texts of one step, or of several where they are drawn."""
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
    """Seconds of each way: one for each turn through all these steps."""
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
    """A process that computes for so long of every ten milliseconds; none for 0."""
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
