"""Tokens sampled by the Triton kernel against the reference, for the same logits and any parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch
from torch import Tensor

from app.engine.sampling.rows import COLUMNS, SamplingTensors, sample_greedy, sample_random_torch, uniform_number
from app.engine.scheduler.batch import NOT_FINITE
from armature_kernels.triton.sampling import _COLUMNS, sample_rows
from compiled_kernels import CAPABILITIES, compile_all

BLOCK = 128  # of a row at a time, so that rows have several

# temperature, top_k, top_p, min_p
ROWS = [
    (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 40, 0.95, 0.02), (2.0, 0, 0.999999, 0.0),
    (1.0, 1, 1.0, 0.0), (0.3, 199, 1.0, 0.0), (1.0, 2**31 - 1, 0.5, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 0.3), (1e-6, 3, 0.5, 0.0),
    (1.0, 0, 1e-9, 1.0), (0.9, 200, 0.3, 1e-9),
]  # fmt: skip


def drawing_of(rows: list[tuple[float, int, float, float]], device: torch.device, seed: int = 0) -> SamplingTensors:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    uniforms = [uniform_number(seed, row) for row in range(len(rows))]
    made = [torch.tensor(values, device=device) for values in (temperature, min_p)]
    wide = [torch.tensor(values, dtype=torch.float64, device=device) for values in (top_p, uniforms)]
    narrow = torch.tensor(top_k, dtype=torch.int32, device=device)
    return SamplingTensors({"temperature": made[0], "top_k": narrow, "top_p": wide[0], "min_p": made[1]}, wide[1])


def drawn(logits: Tensor, drawing: SamplingTensors) -> Tensor:
    return sample_rows(logits, drawing.columns, drawing.uniforms, block=BLOCK, most_listed=64)


def logits_of(rows: int, vocab: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(dtype).to(device)


def test_the_kernel_takes_every_column_of_the_table() -> None:
    assert tuple(column.name for column in COLUMNS) == _COLUMNS


@pytest.mark.parametrize(
    ("vocab", "dtype", "rows"), [(200, torch.bfloat16, 14), (200, torch.float32, 6), (1, torch.float16, 3)]
)
def test_the_kernel_draws_what_the_reference_draws(
    vocab: int, dtype: torch.dtype, rows: int, gpu: torch.device
) -> None:
    """Half precision has ties, at the filters' borders too."""
    logits, drawing = logits_of(rows, vocab, 2, dtype, gpu), drawing_of(ROWS[:rows], gpu, 2)
    assert drawn(logits, drawing).tolist() == sample_random_torch(logits, drawing).tolist()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1.0, 4, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 0, 0.71, 0.0), [1, 1, 2, 3, 3]),
        ((1.0, 2, 0.5, 0.0), [1, 1, 1, 1, 1]),
        ((1.0, 0, 1.0, 0.74), [1, 1, 1, 3, 3]),
    ],
)
def test_all_that_may_be_drawn_is_and_nothing_else(
    row: tuple[float, int, float, float], expected: list[int], gpu: torch.device
) -> None:
    logits = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05]).log().repeat(5, 1).to(gpu)
    numbers = torch.tensor([0.0, 0.3, 0.5, 0.7, 0.97], dtype=torch.float64, device=gpu)
    assert drawn(logits, replace(drawing_of([row] * 5, gpu), uniforms=numbers)).tolist() == expected


def test_the_ends_of_the_numbers_draw_the_first_and_the_last(gpu: torch.device) -> None:
    logits = torch.full((2, 300), -math.inf, device=gpu)
    logits[:, [3, 150, 290]] = 1.0
    drawing = replace(
        drawing_of([(1.0, 0, 1.0, 0.0)] * 2, gpu),
        uniforms=torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=gpu),
    )
    assert drawn(logits, drawing).tolist() == [3, 290]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so(bad: float, gpu: torch.device) -> None:
    logits = logits_of(2, 300, 5, torch.float32, gpu)
    drawing = drawing_of([ROWS[0], ROWS[1]], gpu)
    good = drawn(logits, drawing).tolist()
    for row in range(2):
        broken = logits.clone()
        broken[row, slice(None) if bad < 0 else 297] = bad
        assert drawn(broken, drawing).tolist() == [NOT_FINITE if at == row else one for at, one in enumerate(good)]


def test_rows_of_temperature_nought_are_greedy(gpu: torch.device) -> None:
    logits = torch.zeros((2, 300), dtype=torch.bfloat16, device=gpu)
    logits[1, [140, 299]] = 2.0
    assert drawn(logits, drawing_of([ROWS[1]] * 2, gpu)).tolist() == sample_greedy(logits).tolist() == [0, 140]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_and_keeps_within_registers(capability: int) -> None:
    found = compile_all("launches_sampling", capability)
    assert [one.kernel for one in found] == ["_sample"] * 2
    assert all(one.stack == 0 for one in found)
