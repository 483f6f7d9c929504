"""Measure the linear forms with many rows, to choose the form of an encoder's products.

    python -m tools.measure.matrix_products [--threads 2] [--rounds 9] [--rows 16,128,1024] [--shapes 1024x4096]

A shape is outputs x inputs. Forms take turns within each round, and the best round of each counts. Activations are
quantized before the measurement. The second figure of each form includes a fused GELU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as modules

import torch

modules.insert(0, str(Path(__file__).resolve().parents[2]))

from armature_kernels.elementwise.activations import activate
from armature_kernels.linear.activations import quantize
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.linear import FORMS, ActivatingForm
from armature_kernels.native.library import native_library

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Product = Callable[[], object]


def products(outputs: int, inputs: int, rows: int) -> dict[str, tuple[Product, Product]]:
    """Return for each form the product alone, and the product followed by a GELU."""
    found: dict[str, tuple[Product, Product]] = {}
    for dtype_name, dtype in DTYPES.items():
        weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
        for name in ("onednn", "panels"):
            if FORMS[name].supports(outputs, inputs, dtype):
                found[f"{name} {dtype_name}"] = pair(FORMS[name].pack(weight, None), x)
    packing = IntPanelFactory(8, None)
    if packing.supports(outputs, inputs, torch.bfloat16):
        form: IntPanelLinear = packing.pack(torch.randn(outputs, inputs), None)
        found["int8"] = pair(form, quantize(torch.randn(rows, inputs).bfloat16(), form.row_groups))
    return found


def pair(form: object, x: object) -> tuple[Product, Product]:
    fused = isinstance(form, ActivatingForm)
    return lambda: form.multiply(
        x
    ), lambda: form.multiply_activated(x, "gelu") if fused else activate(form.multiply(x), "gelu")  # type: ignore[attr-defined]


def seconds(product: Product) -> float:
    begun = time.perf_counter()
    product()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="16,128,512,1024,2048")
    parser.add_argument(
        "--shapes", default="1024x1024,3072x1024,4096x1024,1024x4096,384x384,1152x384,1536x384,384x1536"
    )
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"{native_library().reason}, {asked.threads} threads; GFLOP/s, alone and with a GELU")
    for shape in asked.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        for rows in map(int, asked.rows.split(",")):
            forms = products(outputs, inputs, rows)
            best = {name: [float("inf"), float("inf")] for name in forms}
            for _ in range(asked.rounds):
                for name, both in forms.items():
                    best[name] = [min(was, seconds(product)) for was, product in zip(best[name], both, strict=True)]
            rates = (
                f"{name} {rate(shape, rows, was[0]):.0f} / {rate(shape, rows, was[1]):.0f}"
                for name, was in best.items()
            )
            print(f"{shape:>10} x {rows:<5}", "   ".join(rates), flush=True)


def rate(shape: str, rows: int, took: float) -> float:
    outputs, inputs = map(int, shape.split("x"))
    return 2e-9 * outputs * inputs * rows / took


if __name__ == "__main__":
    with torch.inference_mode():
        main()
