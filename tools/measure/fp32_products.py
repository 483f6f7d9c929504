"""Measure fp32 products of fp32 and bf16 weights against torch's: `python -m tools.measure.fp32_products`.

All variants multiply the same shape in turns, and the output has the medians and their ratios: at one row the share of
memory read (the mean of a sample before and one after), at all rows the speed over `F.linear` and over oneDNN's packed
weight in FP32, and that of bf16 weights, widened while they are read, over fp32 weights. `ARMATURE_ISA` selects a level.
`--cpu-time` counts the thread's own seconds, for a machine that is not idle; it needs `--threads 1`, and there is no
share of memory read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.ceilings import ReadBandwidthProbe
from armature_kernels.linear.fp32_panels import Fp32PanelFactory
from armature_kernels.linear.linear import OneDnnLinear
from armature_kernels.native.library import native_library


def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,8,12,32,128,512")
    parser.add_argument("--shape", default="8192x2048", metavar="OUTPUTSxINPUTS")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for each number of rows")
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of the thread, not of the clock")
    asked = parser.parse_args()
    if asked.cpu_time and asked.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    torch.set_num_threads(asked.threads)
    outputs, inputs = map(int, asked.shape.split("x"))
    clock = time.thread_time if asked.cpu_time else time.perf_counter
    print(f"{native_library().level}, {asked.threads} threads, weight [{outputs}, {inputs}], medians")
    with torch.inference_mode(), closing(ReadBandwidthProbe(asked.threads)) as reading:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        for rows in map(int, asked.rows.split(",")):
            reads = rows == 1 and not asked.cpu_time
            before = reading.sample() if reads else None
            times = timed(variants(weight, rows), asked.seconds, clock)
            read = (before + reading.sample()) / 2 if before else None
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            print(report(rows, weight.numel(), medians, read), flush=True)


def variants(weight: Tensor, rows: int) -> Mapping[str, Callable[[], object]]:
    """Return the products of `rows` rows by name."""
    x, linear = torch.randn(rows, weight.shape[1]), weight
    narrow = x.bfloat16()
    fp32, widened = (Fp32PanelFactory(dtype).pack(weight, None) for dtype in (torch.float32, torch.bfloat16))
    found: dict[str, Callable[[], object]] = {
        "F.linear": lambda: F.linear(x, linear),
        "fp32": lambda: fp32.multiply(x),
        "widened": lambda: widened.multiply(narrow),
    }
    if OneDnnLinear.supports(*weight.shape, torch.float32):
        packed = OneDnnLinear.pack(weight, None)
        found["onednn"] = lambda: packed.multiply(x)
    return found


def timed(
    found: Mapping[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> Mapping[str, list[float]]:
    """Return the seconds of each call, in turns until `seconds` are over."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken["fp32"]) < 5:
        for name, call in found.items():
            began = clock()
            call()
            taken[name].append(clock() - began)
    return taken


def report(rows: int, weights: int, medians: Mapping[str, float], read: float | None) -> str:
    """Return a line of milliseconds, then of ratios; `read`: bytes of memory read in a second."""
    times = "  ".join(f"{name} {1e3 * value:.3f}" for name, value in medians.items())
    fp32, widened = medians["fp32"], medians["widened"]
    ratios = [f"fp32 over {name} {medians[name] / fp32:.2f}" for name in ("F.linear", "onednn") if name in medians]
    ratios.append(f"widened over fp32 {fp32 / widened:.2f}")
    if read is not None:
        shares = (nbytes * weights / read / taken for nbytes, taken in ((4, fp32), (2, widened)))
        ratios.append("of {:.1f} GB/s of memory read: fp32 {:.2f}, widened {:.2f}".format(read / 1e9, *shares))
    return f"{rows:5d} rows, ms: {times};  {', '.join(ratios)}; {2e-9 * rows * weights / fp32:.0f} GFLOP/s"


if __name__ == "__main__":
    main()
