"""Native products and decode attention measured alone, by number of rows, against the machine's ceilings.

Products rotate over copies of a weight that exceed every cache, as the layers of a model do. Decode attention reads a
KV cache larger than any processor cache. The ceilings are sampled between any two measurements.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import torch

from app.engine.decoder.kv_cache import KvCache, KvShape
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, progress
from armature_bench.engine.ceilings import CpuCeilingSampler, WorkSamples, mean_ceilings
from armature_kernels.attention.attention import AttentionSequence, AttentionStep, KvSegment
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.ragged import attend
from armature_kernels.linear.activations import quantize
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.torchao_config import INT4_REFERENCE, INT8_REFERENCE
from armature_kernels.linear.torchao_linear import TorchaoFactory, TorchaoLinear
from armature_kernels.native.arguments import OpCode, ProductOutput
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_packed
from armature_kernels.native.operations import has_kernel, observe_operations, operation_array

SEQUENCES, KV_TOKENS = 8, 4000

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 64, 4  # Llama 3.2 1B; together the layers exceed any processor cache

PASSES_PER_ROUND = 12

SHAPES = ((8192, 2048), (2048, 8192))  # outputs, inputs

FORMS = {"int4": IntPanelFactory(bits=4, group=32, double_quantized=True), "int8": IntPanelFactory(bits=8, group=32)}

# The same formats by torchao, and row counts: their products take long, and torchao packs no copies to rotate over.
TORCHAO_FORMS = {"int4": TorchaoFactory(INT4_REFERENCE), "int8": TorchaoFactory(INT8_REFERENCE)}
TORCHAO_ROWS, TORCHAO_PASSES = (1, 16, 128), 3

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)

ROTATED_BYTES = 2**29  # total size of the copies of a weight; of 2**28 a last cache of 16 MiB kept some lines

# Passes over all weights in each round, by number of rows.
PASSES = {1: 8, 2: 8, 4: 8, 8: 8, 16: 6, 32: 4, 64: 6, 128: 4, 512: 2}

MANY_ROWS = 64  # with at least this many rows, a pass covers only a few weights: memory is no longer the limit

KernelCase = tuple[str, tuple[int, int], int]  # form, shape, rows

# Decode attention by dtype of keys and values.
ATTENTION: Mapping[KernelCase, torch.dtype] = {
    ("attention", (SEQUENCES, KV_TOKENS), 1): torch.bfloat16,
    ("attention over int8", (SEQUENCES, KV_TOKENS), 1): torch.int8,
}


def measure_kernels(plan: ServingPlan, facts: Facts, rounds: int) -> BenchOutcome:
    """Measure all kernels on this thread; the products use its thread pool."""
    torch.set_num_threads(plan.cpu.threads)
    if not has_kernel(OpCode.LINEAR_INT):
        return BenchOutcome("kernels", native_library().reason, (), {"machine": facts.to_json()})
    timed: dict[KernelCase, WorkSamples] = {}
    machine = CpuCeilingSampler(plan.cpu.threads, torch.int8, (torch.int8,))
    with (
        progress(
            rounds * (len(FORMS) * len(SHAPES) + len(ATTENTION) * DecodeAttention.available()) + 2, "packing"
        ) as advance,
        closing(machine),
        torch.inference_mode(),
    ):
        weights = {(name, shape): _copies(packing, shape) for name, packing in FORMS.items() for shape in SHAPES}
        advance("measuring")
        complete = _run_rounds(rounds, machine, weights, timed, advance)
        weights.clear()
        torchao = dict(_torchao_seconds()) if complete else {}
        advance("torchao")
    figures = (*machine.figures(), *_figures(timed), *_torchao_figures(torchao, timed))
    details = {
        "machine": facts.to_json(),
        "level": native_library().level,
        "torch": torch.__version__,
        "threads": plan.cpu.threads,
    }
    return BenchOutcome("kernels", f"{native_library().level}, {plan.cpu.threads} threads", figures, details, complete)


def _copies(packing: IntPanelFactory, shape: tuple[int, int]) -> list[IntPanelLinear]:
    outputs, inputs = shape
    first = packing.pack(torch.randn(outputs, inputs) / inputs**0.5, None)
    count = max(2, ROTATED_BYTES // first.panels.numel())
    return [
        first,
        *(
            IntPanelLinear(packing, outputs, inputs, None, allocate_packed(first.panels.numel()).copy_(first.panels))
            for _ in range(count - 1)
        ),
    ]


def _run_rounds(
    rounds: int,
    machine: CpuCeilingSampler,
    weights: dict[tuple[str, tuple[int, int]], list[IntPanelLinear]],
    timed: dict[KernelCase, WorkSamples],
    advance: AdvanceProgress,
) -> bool:
    """Run all rounds. Ctrl-C stops early, keeps the measurements, and makes the result False."""
    attending = (
        {name: DecodeAttention(dtype) for name, dtype in ATTENTION.items()} if DecodeAttention.available() else {}
    )
    try:
        for _ in range(rounds):
            for (name, shape), copies in weights.items():
                for rows in ROWS:
                    one = timed.setdefault((name, shape, rows), _product_samples(copies[0], rows))
                    before = machine.sample()
                    seconds = _time_product(copies, rows)
                    one.add_round(seconds, mean_ceilings(before, machine.sample()))
                advance(f"{name} {shape[0]} × {shape[1]}")
            for attention, attends in attending.items():
                before = machine.sample()
                seconds = attends.layer_seconds()
                timed.setdefault(attention, WorkSamples(attends.num_bytes, 0.0)).add_round(
                    seconds, mean_ceilings(before, machine.sample())
                )
                advance(attention[0])
    except KeyboardInterrupt:
        return False
    return True


def _product_samples(form: IntPanelLinear, rows: int) -> WorkSamples:
    return WorkSamples(float(form.nbytes), 2.0 * rows * form.outputs * form.inputs)


def _time_product(copies: list[IntPanelLinear], rows: int) -> list[float]:
    """Return the seconds of one product for each pass.

    Activations are quantized beforehand. A pass multiplies one weight after the other in one native call, as a step
    does.
    """
    form = copies[0]
    x = quantize(torch.randn(rows, form.inputs).bfloat16(), form.row_groups)
    y = torch.empty(rows, form.outputs, dtype=torch.bfloat16)
    used = copies if rows < MANY_ROWS else copies[:4]
    steps = [
        (OpCode.LINEAR_INT, copy.product_arguments(x, y.data_ptr(), y.stride(0), ProductOutput.BF16)) for copy in used
    ]
    operations, library = operation_array(steps), native_library().library
    assert library is not None, "measure() checked that the library is loaded"
    seconds = []
    for index in range(PASSES[rows] + 1):
        started = time.perf_counter()
        library.armature_run(ctypes.byref(operations), len(steps), torch.get_num_threads())
        if index:
            seconds.append((time.perf_counter() - started) / len(steps))
    return seconds


def _torchao_seconds() -> Iterator[tuple[KernelCase, float]]:
    for (name, factory), shape in itertools.product(TORCHAO_FORMS.items(), SHAPES):
        form = factory.pack(torch.randn(shape) / shape[1] ** 0.5, None)
        for rows in TORCHAO_ROWS:
            x = torch.randn(rows, shape[1]).bfloat16()
            form.multiply(x)
            yield (name, shape, rows), min(_seconds_of(form, x) for _ in range(TORCHAO_PASSES))


def _seconds_of(form: TorchaoLinear, x: torch.Tensor) -> float:
    started = time.perf_counter()
    form.multiply(x)
    return time.perf_counter() - started


def _torchao_figures(seconds: Mapping[KernelCase, float], timed: dict[KernelCase, WorkSamples]) -> Iterator[Figure]:
    for (name, shape, rows), took in seconds.items():
        label = f"{name} {shape[0]}×{shape[1]}, {rows} row{'s' if rows > 1 else ''}, torchao"
        yield Figure(label, took * 1e6, "us", ratio=took / timed[(name, shape, rows)].middle, against="ours")


def _figures(timed: dict[KernelCase, WorkSamples]) -> Iterator[Figure]:
    for (name, shape, rows), one in timed.items():
        if dtype := ATTENTION.get((name, shape, rows)):
            label, target = f"decode {name}, {SEQUENCES} × {KV_TOKENS} tokens", 0.8 if dtype == torch.bfloat16 else None
            yield Figure(
                label, one.middle * 1e6, "us", ratio=one.read_share, against="memory read", target=target, is_share=True
            )
            continue
        label = f"{name} {shape[0]}×{shape[1]}, {rows} row{'s' if rows > 1 else ''}"
        bound, share = one.bound
        target = {1: 0.9, 4: 0.8}.get(rows) if name == "int4" else None
        if name == "int4" and rows == ROWS[-1]:
            bound, share, target = "product rate", one.product_share, 0.75
        yield Figure(
            label, one.middle * 1e6, "us", p99=one.p99 * 1e6, ratio=share, against=bound, target=target, is_share=True
        )
        if name == "int4" and rows == 8:
            alone = timed[(name, shape, 1)].middle
            yield Figure(f"{label}, over 1 row", one.middle / alone, "times", target=1.6, at_most=True)
        if name == "int4" and rows == 16:
            yield Figure(f"{label}, rate", one.operations / one.middle / 1e12, "TOP/s", target=1.1)


class DecodeAttention:
    """Decode attention of one query per sequence against its whole context, layer after layer.

    Cached keys and values are bfloat16, or int8 with scales. Queries are bfloat16 [SEQUENCES, HEADS, HEAD_DIM]. The
    cache is the engine's own `KvCache`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        shape = KvShape(
            num_layers=LAYERS, num_slots=SEQUENCES, max_len=KV_TOKENS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        self._cache = KvCache(shape, dtype)
        written = torch.randn(2, self._cache.stride, KV_HEADS, HEAD_DIM)
        for layer in self._cache.layers:
            for slot in range(SEQUENCES):
                layer.write(torch.arange(self._cache.stride) + self._cache.row(slot, 0), *written.unbind(0))
        self._query = torch.randn(SEQUENCES, HEADS, HEAD_DIM).bfloat16()
        self._step = AttentionStep(SEQUENCES)
        runs = [KvSegment(self._cache.row(slot, 0), KV_TOKENS, 0) for slot in range(SEQUENCES)]
        self._step.fill([AttentionSequence(slot, 1, KV_TOKENS - 1, (run,)) for slot, run in enumerate(runs)])
        self.num_bytes = float(SEQUENCES * KV_TOKENS * self._cache.token_bytes)

    @staticmethod
    def available() -> bool:
        return has_kernel(OpCode.ATTENTION)

    def layer_seconds(self) -> list[float]:
        """Return the seconds that one layer took, for each of `PASSES_PER_ROUND` passes over all layers."""
        call = self._recorded()
        call()
        seconds = []
        for _ in range(PASSES_PER_ROUND):
            started = time.perf_counter()
            call()
            seconds.append((time.perf_counter() - started) / LAYERS)
        return seconds

    def _recorded(self) -> Callable[[], object]:
        steps: list[tuple[OpCode, ctypes.Structure]] = []
        with observe_operations(
            lambda code, arguments: steps.append((code, arguments))
        ):  # `kept` owns the output buffers
            outputs = [
                attend(self._query, layer, self._step, AttentionSpec(HEAD_DIM**-0.5)) for layer in self._cache.layers
            ]
        operations, library = operation_array(steps), native_library().library
        assert library is not None, "available: here() was checked first"
        return lambda: (library.armature_run(ctypes.byref(operations), len(steps), torch.get_num_threads()), outputs)
