"""Measure the host's work for a decode step without a device: `python -m tools.hardware.host [--rows 64]`.

It runs the engine as on a device (scheduler, page tables, step inputs, sampling, stream events, snapshots) over a
backend whose captured steps do nothing. While the result is below the device's own time of a step, launching ahead
hides it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.backends import selection
from app.engine.build import BuildRequest
from app.engine.decoder.build import build_device_decoder_engine
from app.hardware.facts import CudaDevice, TorchBuild
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES
from armature_bench.engine.decoder import gc_disabled
from armature_bench.engine.driver import DecoderDriver
from armature_bench.http.workload import TokenPrompts
from tests.support.simulated_device import SimulatedDeviceBackend
from tools.hardware.shapes import SMALL_LLAMA, write

STEPS = 300


class Nothing:
    """A captured step that does nothing."""

    def replay(self) -> None:
        """Do nothing: a device would now be busy while the host continues."""


class IdleBackend(SimulatedDeviceBackend):
    """A backend whose captured steps cost nothing. Everything else is the simulated device's."""

    def capture(self, work: Callable[[], None]) -> Any:
        return Nothing()


class Standing(DecoderDriver):
    """The engine with the snapshot that the worker takes after each step."""

    def _step(self) -> tuple[float, tuple[int, int]]:
        elapsed, tokens = super()._step()
        start = time.perf_counter()
        self._engine.snapshot()
        return elapsed + time.perf_counter() - start, tokens


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hardware.host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences of a step")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rows, seconds in measured(Path(folder), asked.rows).items():
            middle, slow = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
            print(
                f"decode ×{rows}: {middle * 1e3:.3f} ms a step on the host (p99 {slow * 1e3:.3f}), {middle / rows * 1e6:.1f} us a sequence"
            )
    return 0


def measured(folder: Path, rows: list[int]) -> dict[int, list[float]]:
    """Return the seconds of steps for each number of sequences."""
    selection.DEVICE_BACKENDS = {"cuda": IdleBackend}  # type: ignore[dict-item]
    gpu = CudaDevice(0, "none", (9, 0), 80 * 2**30, free_bytes=80 * 2**30)
    facts = probe()
    facts = type(facts)(
        **{name: getattr(facts, name) for name in facts.__slots__} | {"cuda": (gpu,), "torch": TorchBuild("2", "13.0")}
    )
    checkpoint = open_checkpoint(write(SMALL_LLAMA, folder / "model"))
    settings = Settings(threads=1, precision="bf16", max_running_seqs=max(rows), itl_target_ms=60_000)
    plan = make_plan(facts, None, settings, checkpoint.needs(), RECIPES.keys())
    built = build_device_decoder_engine(BuildRequest(checkpoint, plan))
    driver = Standing(built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), plan.memory.max_model_len)
    with torch.inference_mode(), gc_disabled():
        return {count: driver.decode(count, STEPS) for count in rows}


if __name__ == "__main__":
    sys.exit(main())
