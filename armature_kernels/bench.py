"""Time the linear forms on this machine: `python -m armature_kernels.bench [--outputs N] [--inputs N] [--rows N ...]`.

bf16 is torch's own product. Each product rotates over copies of its weight that exceed the processor's caches, as the
layers of a model do. The time is the median. `armature bench kernels` of the server compares such products with the
machine's ceilings.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from armature_kernels.linear.linear import FORMS, QUANTIZED_FORMS, LinearForm
from armature_kernels.native.library import native_library

BENCHED = {
    "bf16": FORMS["plain"],
    "int8": QUANTIZED_FORMS["int8"],
    "int4": QUANTIZED_FORMS["int4/32 double quantized"],
}
ROTATED_BYTES = 2**28
PASSES = 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row for each form and number of rows."""
    parser = argparse.ArgumentParser(
        prog="python -m armature_kernels.bench", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    asked = parser.parse_args(arguments)
    if native_library().library is None:
        print(f"There is nothing to measure: {native_library().reason}.")
        return 1
    print(f"{native_library().reason}, {torch.get_num_threads()} threads, weight [{asked.outputs}, {asked.inputs}]")
    print(f"{'form':6}{'rows':>6}{'us':>10}{'GB/s':>8}{'GFLOP/s':>10}")
    weight = torch.randn(asked.outputs, asked.inputs).bfloat16() / asked.inputs**0.5
    for name, factory in BENCHED.items():
        first = factory.pack(weight, None)
        copies = [first, *(factory.pack(weight, None) for _ in range(ROTATED_BYTES // first.nbytes))]
        for rows in asked.rows:
            seconds = median_seconds(copies, torch.randn(rows, asked.inputs).bfloat16())
            rate = 2 * rows * asked.outputs * asked.inputs / seconds
            print(f"{name:6}{rows:6}{seconds * 1e6:10.0f}{first.nbytes / seconds / 1e9:8.1f}{rate / 1e9:10.0f}")
    return 0


def median_seconds(forms: Sequence[LinearForm], x: torch.Tensor) -> float:
    """Return the median seconds of a product with x [rows, inputs], each time of the next form."""
    taken = []
    with torch.inference_mode():
        for form in itertools.islice(itertools.cycle(forms), PASSES + 1):
            started = time.perf_counter()
            form.multiply(x)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    raise SystemExit(main())
