"""Tokens sampled by the Triton kernels against the reference, for the same logits and any parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch
from torch import Tensor

from app.engine.sampling import rows
from app.engine.sampling.rows import COLUMNS, SamplingTensors, sample_greedy_torch, sample_random_torch, uniform_number
from app.engine.scheduler.batch import NOT_FINITE
from armature_kernels.triton import sampling, support
from armature_kernels.triton.sampling import _COLUMNS, likeliest_ids, sample_rows
from compiled_kernels import CAPABILITIES, compile_all

BLOCK, LISTED = 128, 64  # so that rows have several parts, and more scores than are listed

# temperature, top_k, top_p, min_p
ROWS = [
    (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 40, 0.95, 0.02), (2.0, 0, 0.999999, 0.0),
    (1.0, 1, 1.0, 0.0), (0.3, 199, 1.0, 0.0), (1.0, 2**31 - 1, 0.5, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 0.3), (1e-6, 3, 0.5, 0.0),
    (1.0, 0, 1e-9, 1.0), (0.9, 200, 0.3, 1e-9), (5.0, 0, 0.95, 0.0), (1.0, 150, 0.95, 0.0),
]  # fmt: skip


def drawing_of(rows: list[tuple[float, int, float, float]], device: torch.device, seed: int = 0) -> SamplingTensors:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    uniforms = [uniform_number(seed, row) for row in range(len(rows))]
    made = [torch.tensor(values, device=device) for values in (temperature, min_p)]
    wide = [torch.tensor(values, dtype=torch.float64, device=device) for values in (top_p, uniforms)]
    narrow = torch.tensor(top_k, dtype=torch.int32, device=device)
    return SamplingTensors({"temperature": made[0], "top_k": narrow, "top_p": wide[0], "min_p": made[1]}, wide[1])


def test_a_sampler_that_is_wrong_on_this_gpu_does_not_serve(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rows, "triton_usable", lambda tensor: True)
    monkeypatch.setattr(rows, "_COMPARED_ROWS", 16)
    monkeypatch.setattr(support, "_agreed", {})
    logits, drawing = (
        torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).to(gpu),
        drawing_of(ROWS[2:4], gpu),
    )
    expected, greedy = sample_random_torch(logits, drawing), sample_greedy_torch(logits)
    assert rows.share_sampled_differently(logits) == 0.0
    assert torch.equal(rows.sample_random(logits, drawing), expected)
    monkeypatch.setattr(support, "_agreed", {})
    monkeypatch.setattr(
        sampling, "likeliest_ids", lambda logits: torch.zeros(len(logits), dtype=torch.int64, device=gpu)
    )
    assert torch.equal(rows.sample_greedy(logits), greedy) and torch.equal(
        rows.sample_random(logits, drawing), expected
    )
    assert caplog.text.count("The kernel of sampling differs from its reference") == 1


def drawn(logits: Tensor, drawing: SamplingTensors) -> Tensor:
    return sample_rows(logits, drawing.columns, drawing.uniforms, block=BLOCK, most_listed=LISTED)


def logits_of(rows: int, vocab: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(dtype).to(device)


def test_the_kernel_takes_every_column_of_the_table() -> None:
    assert tuple(column.name for column in COLUMNS) == _COLUMNS


@pytest.mark.parametrize(
    ("vocab", "dtype", "rows"), [(500, torch.bfloat16, 16), (200, torch.float32, 16), (1, torch.float16, 3)]
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


def test_neither_parts_nor_the_list_change_a_token(gpu: torch.device) -> None:
    """The last token that the filters leave of a sorted row shows their borders. Of more than 32 rows a part has more blocks."""
    logits = torch.cat([logits_of(17, 450, seed, torch.float32, gpu) * scale for seed, scale in ((3, 1.0), (4, 1e-2))])
    logits[5:8] = logits[5:8].round()  # ties across parts, at the filters' borders too
    logits[9, ::2], logits[10, 1:440], logits[23, 120:], logits[30] = -1e9, -math.inf, -1e9, 0.5
    logits = logits.sort(descending=True).values
    drawing = drawing_of((ROWS * 3)[: len(logits)], gpu)
    drawing = replace(drawing, uniforms=torch.full_like(drawing.uniforms, 1 - 2.0**-53))
    found = drawn(logits, drawing).tolist()
    assert found == sample_rows(logits, drawing.columns, drawing.uniforms, block=1024).tolist()
    assert found == sample_random_torch(logits, drawing).tolist()


def test_scores_close_together_are_told_apart(gpu: torch.device) -> None:
    """As many as are listed, then more: the search of the whole row."""
    rows = [(1.0, 30, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 31, 0.5, 0.0)]
    logits = torch.full((8, 200), -20.0, device=gpu)
    for at in range(8):
        close = 60 if at < 4 else 150
        # Neighbours among all floats, or far enough apart for their exponentials to differ.
        logits[at, :close] = 5.0 + torch.arange(close, 0, -1) * (2.0**-21 if at % 4 == 0 else 1e-6)
        logits[at, 0] = 5.5
    drawing = drawing_of(rows * 2, gpu)
    drawing = replace(drawing, uniforms=torch.full_like(drawing.uniforms, 1 - 2.0**-53))
    assert drawn(logits, drawing).tolist() == sample_random_torch(logits, drawing).tolist()


def test_rows_without_filters_need_no_thresholds(gpu: torch.device) -> None:
    logits, drawing = logits_of(2, 300, 6, torch.bfloat16, gpu), drawing_of([ROWS[0], (0.5, 0, 1.0, 0.0)], gpu, 6)
    found = sample_rows(logits, drawing.columns, drawing.uniforms, filtered=False, block=BLOCK)
    assert found.tolist() == sample_random_torch(logits, drawing).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so(bad: float, gpu: torch.device) -> None:
    logits = logits_of(2, 300, 5, torch.float32, gpu)
    drawing = drawing_of([ROWS[0], ROWS[1]], gpu)
    good = drawn(logits, drawing).tolist()
    for row in range(2):
        broken = logits.clone()
        broken[row, slice(None) if bad < 0 else 297] = bad
        assert drawn(broken, drawing).tolist() == [NOT_FINITE if at == row else one for at, one in enumerate(good)]


def test_greedy_rows_take_the_first_most_likely_token(gpu: torch.device) -> None:
    """With ties across parts, both zeros, and rows that are not finite, the last by one value in the last part."""
    logits = torch.zeros((7, 2500), dtype=torch.bfloat16, device=gpu)
    logits[1, [140, 2499]], logits[2], logits[2, 1500] = 2.0, -3.0, -2.5
    logits[3, :3] = torch.tensor([-0.0, -1.0, 0.0])
    logits[4], logits[5, 2000], logits[6, 2499] = -math.inf, math.inf, math.nan
    expected = sample_greedy_torch(logits).tolist()
    assert likeliest_ids(logits).tolist() == expected == [0, 140, 1500, 0, NOT_FINITE, NOT_FINITE, NOT_FINITE]
    assert drawn(logits, drawing_of([ROWS[1]] * 7, gpu)).tolist() == expected


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_and_keeps_within_registers(capability: int) -> None:
    found = compile_all("launches_sampling", capability)
    drawn, filters = ["_likeliest", "_draw"], ["_likeliest", "_narrow", "_threshold", "_draw"]
    assert [one.kernel for one in found] == [*filters, "_likeliest", *drawn, *filters]
    assert all(one.stack == 0 for one in found)
