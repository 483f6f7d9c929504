"""Compare the steps of two native libraries: `python -m tools.measure.two_libraries OTHER --model DIR [--precision int4]`.

One engine decodes, and each step is run by the other library than the step before, so that a machine whose speed changes
disturbs both alike. OTHER is a `libarmature.so` with the operations of this checkout's: a change of kernels is measured
against the library before it. The output has the medians, and the median and quartiles of the paired ratios (this
checkout's over the other's). A ratio whose quartiles lie on both sides of 1 is within the noise. Compare with a copy of
the same library too: on two cores of Zen 3 it gave 0.98.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.server.prepare import prepare
from app.settings import Settings

if TYPE_CHECKING:
    from armature_bench.engine.driver import DecoderDriver

WARM_UP_STEPS = 10  # records the step


class AlternatingLibraries:
    """Stands in for the function `armature_run`, and calls that of one library after the other."""

    def __init__(self, functions: Sequence[Callable[..., int]]) -> None:
        self._functions = functions
        self.chosen = 0

    def __call__(self, *arguments: object) -> int:
        """Run operations with the library that is chosen."""
        return self._functions[self.chosen](*arguments)

    def choose_next(self) -> None:
        """Choose the next library; after the last one the first."""
        self.chosen = (self.chosen + 1) % len(self._functions)


def report(ours: Sequence[float], others: Sequence[float]) -> str:
    """Return a line of milliseconds and ratios of steps that were run in turns."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=False)]
    first, middle, third = statistics.quantiles(ratios, n=4)
    return (
        f"{1e3 * statistics.median(ours):.3f} ms, other {1e3 * statistics.median(others):.3f} ms: "
        f"ratio {middle:.3f} (quartiles {first:.3f} to {third:.3f}, {len(ratios)} pairs)"
    )


def alternate(other: Path) -> AlternatingLibraries:
    """Put the function that alternates into the loaded library. Engines that are built later call it."""
    from armature_kernels.native.library import load_library, native_library

    library, level = native_library().library, native_library().level
    if library is None or level is None:
        raise SystemExit(f"There is nothing to compare: {native_library().reason}.")
    loaded = load_library(other)
    if loaded.armature_select(level.encode()) != 0:  # else it would choose its best, whatever ARMATURE_ISA says
        raise SystemExit(f"{other} lacks the level {level}, which this checkout's library uses.")
    libraries = AlternatingLibraries([library.armature_run, loaded.armature_run])
    library.armature_run = libraries
    return libraries


def decode_in_turns(
    driver: DecoderDriver, libraries: AlternatingLibraries, rows: int, pairs: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of decode steps of each library."""
    seconds: tuple[list[float], list[float]] = ([], [])

    def add(elapsed: float, tokens: tuple[int, int]) -> None:
        if tokens == (0, rows):
            seconds[libraries.chosen].append(elapsed)
        libraries.choose_next()

    driver.after_step = add
    driver.decode(rows, WARM_UP_STEPS)
    for one in seconds:
        one.clear()
    driver.decode(rows, 2 * pairs)
    return seconds


def main() -> None:
    """Print one line of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--cache-dir", type=Path, help="folder of packed weights, as of serve")
    given = parser.parse_args()
    if not given.other.exists():
        parser.error(f"{given.other} does not exist")
    settings = Settings(
        model=given.model,
        precision=given.precision,
        calibrate="off",
        speculation="off",
        max_model_len=1024,
        cache_dir=given.cache_dir,
    )
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    import torch

    from app.engine.build import BuildRequest
    from app.engine.decoder.build import build_decoder_engine
    from app.weights.open import require_checkpoint
    from armature_bench.engine.decoder import gc_disabled
    from armature_bench.engine.driver import DecoderDriver
    from armature_bench.http.workload import TokenPrompts

    libraries = alternate(given.other)
    checkpoint = require_checkpoint(prepared.checkpoint)
    built = build_decoder_engine(BuildRequest(checkpoint, prepared.plan))
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), 1024)
    with torch.inference_mode(), gc_disabled():
        ours, others = decode_in_turns(driver, libraries, given.rows, given.pairs)
    print(f"decode step of {given.rows} rows, {given.precision}: {report(ours, others)}")


if __name__ == "__main__":
    main()
