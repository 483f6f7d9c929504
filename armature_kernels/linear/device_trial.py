"""The trial of the kernel for few rows (triton/linear.py) on a GPU: it is used where it is right and faster.

It multiplies weights of the same kind and size as those that are served, of which there are so many that none stays in
the GPU's cache, by the kernel and without it. The trial waits for the device, so it runs while weights are loaded and
never during a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from armature_kernels.linear.layout import MAX_FEW_ROWS
from armature_kernels.triton.support import relative_difference, triton_usable

_TRIED_ROWS = (MAX_FEW_ROWS, 1)
_MAX_OUTPUTS = 2**15  # of a weight in a trial: more behave alike
_BYTES, _MAX_WEIGHTS = 2**27, 32  # of all weights of a trial: more than a GPU's cache holds
_REPLAYS = 10
_INPUTS = 16  # a multiple of it has whole words of every kind


class _Form(Protocol):
    few_rows: int

    @property
    def nbytes(self) -> int: ...

    def multiply(self, x: Tensor) -> Tensor: ...


class _Factory(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> _Form: ...


_found: dict[tuple[_Factory, int, int], int] = {}


def find_few_rows(factory: _Factory, outputs: int, inputs: int) -> int:
    """Return the most rows for which the kernel is used with weights [outputs, inputs] of this kind; 0: it is not."""
    key = (factory, min(outputs, _MAX_OUTPUTS), inputs)
    if key not in _found:
        _found[key] = 0  # of the forms that the trial makes
        _found[key] = _tried(*key) if _is_possible(factory, inputs) else 0
    return _found[key]


def _is_possible(factory: _Factory, inputs: int) -> bool:
    block: tuple[int, int] | None = getattr(factory, "block", None)
    whole = inputs % _INPUTS == 0 and (block is None or block[1] % _INPUTS == 0)
    return (
        whole
        and factory.dtype in (torch.bfloat16, torch.float16)
        and triton_usable(torch.empty(0, device=factory.device))
    )


def _tried(factory: _Factory, outputs: int, inputs: int) -> int:
    generator = torch.Generator(factory.device).manual_seed(0)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, inputs, generator=generator, dtype=factory.dtype, device=factory.device)

    weight = random(outputs)
    forms = [factory.pack(weight, None)]
    while len(forms) < min(_MAX_WEIGHTS, _BYTES // forms[0].nbytes):
        forms.append(factory.pack(weight, None))
    for rows in _TRIED_ROWS:  # faster for more rows, it is faster for fewer too
        x = random(rows)
        without, expected = _seconds_and_product(forms, x, 0)
        seconds, product = _seconds_and_product(forms, x, rows)
        error = relative_difference(product, expected)
        is_used = error < 0.02 and seconds <= without
        logging.getLogger(__name__).info(
            "Products of %d rows with [%d, %d] by %s: %.1f µs by the kernel for few rows, %.1f µs without it, "
            "relative difference %.1g: %s.",
            rows, outputs, inputs, type(factory).__name__, seconds * 1e6, without * 1e6, error,
            "used" if is_used else "not used",
        )  # fmt: skip
        if is_used:
            return rows
    return 0


def _seconds_and_product(forms: Sequence[_Form], x: Tensor, few_rows: int) -> tuple[float, Tensor]:
    for form in forms:
        form.few_rows = few_rows
    seconds = graph_seconds(lambda: [form.multiply(x) for form in forms], x.device) / len(forms)
    return seconds, forms[0].multiply(x)


def graph_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of `work` on a GPU as a graph, without the host's time to launch it."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        times = []
        for _ in range(_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
    torch.cuda.current_stream(device).wait_stream(stream)
    return median(times) / 1000
