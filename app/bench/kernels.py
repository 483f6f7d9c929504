"""Native products and decode attention measured alone, by number of rows, against the machine's ceilings.

Products rotate over copies of a weight that exceed every cache, as the layers of a model do. The ceilings are
sampled between any two measurements.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import torch

from app.bench.attending import KV_TOKENS, SEQUENCES, Attending
from app.bench.ceilings import Machine, Samples, between
from app.bench.console import Advance, progress
from app.bench.stats import Figure, Outcome
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan
from app.kernels.activations import quantise
from app.kernels.int_panels import IntPacking, IntPanels
from app.kernels.memory import aligned
from app.kernels.native import native
from app.kernels.operations import Code, Output, has, listed

SHAPES = ((8192, 2048), (2048, 8192))  # outputs, inputs
FORMS = {"int4": IntPacking(bits=4, group=64), "int8": IntPacking(bits=8, group=None)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
ROTATED_BYTES = 2**28  # total size of the copies of a weight, far beyond any cache
# Passes over all weights in each round, by number of rows.
PASSES = {1: 8, 2: 8, 4: 8, 8: 8, 16: 6, 32: 4, 64: 6, 128: 4, 512: 2}
MANY_ROWS = 64  # with at least this many rows, a pass covers only a few weights: memory is no longer the limit


Name = tuple[str, tuple[int, int], int]  # form, shape, rows
# Decode attention by dtype of keys and values.
ATTENTION: Mapping[Name, torch.dtype] = {
    ("attention", (SEQUENCES, KV_TOKENS), 1): torch.bfloat16,
    ("attention over int8", (SEQUENCES, KV_TOKENS), 1): torch.int8,
}


def measure(plan: ServingPlan, facts: Facts, rounds: int) -> Outcome:
    """Measure all kernels on this thread, whose thread pool the products use."""
    torch.set_num_threads(plan.threads.value)
    if not has(Code.LINEAR_INT):
        return Outcome("kernels", native().reason, (), {"machine": facts.to_json()})
    timed: dict[Name, Samples] = {}
    machine = Machine(plan.threads.value, torch.int8, (torch.int8,))
    with (
        progress(rounds * (len(FORMS) * len(SHAPES) + len(ATTENTION) * Attending.here()) + 1, "packing") as advance,
        closing(machine),
        torch.inference_mode(),
    ):
        weights = {(name, shape): _copies(packing, shape) for name, packing in FORMS.items() for shape in SHAPES}
        advance("measuring")
        complete = _rounds(rounds, machine, weights, timed, advance)
    figures = (*machine.figures(), *_figures(timed))
    details = {"machine": facts.to_json(), "level": native().level, "torch": torch.__version__, "threads": plan.threads.value}
    return Outcome("kernels", f"{native().level}, {plan.threads.value} threads", figures, details, complete)


def _copies(packing: IntPacking, shape: tuple[int, int]) -> list[IntPanels]:
    outputs, inputs = shape
    first = packing.pack(torch.randn(outputs, inputs) / inputs**0.5, None)
    count = max(2, ROTATED_BYTES // first.panels.numel())
    return [
        first,
        *(IntPanels(packing, outputs, inputs, None, aligned(first.panels.numel()).copy_(first.panels)) for _ in range(count - 1)),
    ]


def _rounds(
    rounds: int,
    machine: Machine,
    weights: dict[tuple[str, tuple[int, int]], list[IntPanels]],
    timed: dict[Name, Samples],
    advance: Advance,
) -> bool:
    """Run all rounds. Ctrl-C stops early, keeps the measurements, and makes the result False."""
    attending = {name: Attending(dtype) for name, dtype in ATTENTION.items()} if Attending.here() else {}
    try:
        for _ in range(rounds):
            for (name, shape), copies in weights.items():
                for rows in ROWS:
                    one = timed.setdefault((name, shape, rows), _empty(copies[0], rows))
                    before = machine.sample()
                    seconds = _time(copies, rows)
                    one.hold(seconds, between(before, machine.sample()))
                advance(f"{name} {shape[0]} × {shape[1]}")
            for attention, attends in attending.items():
                before = machine.sample()
                seconds = attends.time()
                timed.setdefault(attention, Samples(attends.num_bytes, 0.0)).hold(seconds, between(before, machine.sample()))
                advance(attention[0])
    except KeyboardInterrupt:
        return False
    return True


def _empty(form: IntPanels, rows: int) -> Samples:
    return Samples(float(form.nbytes), 2.0 * rows * form.outputs * form.inputs)


def _time(copies: list[IntPanels], rows: int) -> list[float]:
    """Return the seconds of one product for each pass.

    Activations are quantised beforehand. A pass multiplies one weight after the other in one native call, as a step
    does.
    """
    form = copies[0]
    x = quantise(torch.randn(rows, form.inputs).bfloat16(), form.group)
    y = torch.empty(rows, form.outputs, dtype=torch.bfloat16)
    used = copies if rows < MANY_ROWS else copies[:4]
    steps = [(Code.LINEAR_INT, copy.product(x, y.data_ptr(), y.stride(0), Output.BF16)) for copy in used]
    operations, library = listed(steps), native().library
    assert library is not None, "measure() checked that the library is loaded"
    seconds = []
    for index in range(PASSES[rows] + 1):
        started = time.perf_counter()
        library.armature_run(ctypes.byref(operations), len(steps), torch.get_num_threads())
        if index:
            seconds.append((time.perf_counter() - started) / len(steps))
    return seconds


def _figures(timed: dict[Name, Samples]) -> Iterator[Figure]:
    for (name, shape, rows), one in timed.items():
        if dtype := ATTENTION.get((name, shape, rows)):
            label, target = f"decode {name}, {SEQUENCES} × {KV_TOKENS} tokens", 0.8 if dtype == torch.bfloat16 else None
            yield Figure(label, one.middle * 1e6, "us", ratio=one.read_share, against="memory read", target=target, is_share=True)
            continue
        label = f"{name} {shape[0]}×{shape[1]}, {rows} row{'s' if rows > 1 else ''}"
        bound, share = one.bound
        target = {1: 0.9, 4: 0.8}.get(rows) if name == "int4" else None
        if name == "int4" and rows == ROWS[-1]:
            bound, share, target = "product rate", one.product_share, 0.75
        yield Figure(label, one.middle * 1e6, "us", p99=one.p99 * 1e6, ratio=share, against=bound, target=target, is_share=True)
        if name == "int4" and rows == 8:
            alone = timed[(name, shape, 1)].middle
            yield Figure(f"{label}, over 1 row", one.middle / alone, "times", target=1.6, at_most=True)
        if name == "int4" and rows == 16:
            yield Figure(f"{label}, rate", one.operations / one.middle / 1e12, "TOP/s", target=1.1)
