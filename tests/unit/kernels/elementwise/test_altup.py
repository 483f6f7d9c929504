"""Streams before and after a layer, and rows with the magnitude of others: against their definitions, at every level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from armature_kernels.elementwise.altup import (
    Correction,
    StreamMix,
    correct_streams,
    correct_streams_torch,
    match_rows,
    match_rows_torch,
    predict_streams,
    predict_streams_torch,
)
from armature_kernels.linear.activations import RowGroups, unquantised
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level
from row_checks import LEVELS, WHOLE_ROW, check, group_of, needs_levels, rows_of

SIZES = [1, 33, 576, 2048]


def mix_of(rows: int, streams: int, size: int, corrects: bool) -> StreamMix:
    weights = rows_of(streams if corrects else streams**2, streams, seed=3)
    return StreamMix(rows_of(rows, streams, seed=2), weights, size)


def states_of(rows: int, mix: StreamMix) -> Tensor:
    """With columns behind the streams, which stay."""
    return rows_of(rows, mix.num_streams * mix.size + 5)


def correction_of(rows: int, size: int) -> Correction:
    return Correction(rows_of(rows, size, seed=4), 0.75, rows_of(1, size, seed=5)[0])


def test_predictions_and_corrections_are_as_defined() -> None:
    """Token by token and stream by stream, as the paper has it."""
    mix, size, rows = mix_of(2, 3, 4, corrects=False), 4, 2
    states = states_of(rows, mix)
    found = states.clone()
    predict_streams_torch(found, mix)
    for token in range(rows):
        streams, m = states[token, :12].view(3, size), torch.tanh(mix.logits[token])
        for k in range(3):
            factors = [float(mix.weights[3 * k + i] @ m) for i in range(3)]
            meant = streams[k] + sum(factor * stream for factor, stream in zip(factors, streams, strict=True))
            torch.testing.assert_close(found[token, k * size : (k + 1) * size], meant)
    mix, correction = mix_of(2, 3, 4, corrects=True), correction_of(2, 4)
    found = states.clone()
    first = correct_streams_torch(found, mix, correction)
    for token in range(rows):
        streams, m = states[token, :12].view(3, size), torch.tanh(mix.logits[token])
        change = 0.75 * correction.activated[token] - streams[0]
        for k in range(3):
            meant = streams[k] + (1 + float(mix.weights[k] @ m)) * change
            torch.testing.assert_close(found[token, k * size : (k + 1) * size], meant)
    torch.testing.assert_close(first, found[:, :size] * correction.factors)


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_predicted_streams_equal_their_reference(level: str, rows: int, streams: int, size: int) -> None:
    mix = mix_of(rows, streams, size, corrects=False)
    states, twin = states_of(rows, mix), states_of(rows, mix)
    with at_level(level):
        assert has_kernel(OpCode.ALTUP)
        predict_streams(states, mix)
    predict_streams_torch(twin, mix)
    torch.testing.assert_close(states, twin, rtol=1e-5, atol=1e-4)
    assert torch.equal(states[:, -5:], twin[:, -5:])


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [None, WHOLE_ROW, RowGroups(32), RowGroups(32, 4)], ids=str)
def test_corrected_streams_equal_their_reference(
    level: str, rows: int, size: int, dtype: torch.dtype, group: RowGroups | None
) -> None:
    mix, correction, own = mix_of(rows, 4, size, corrects=True), correction_of(rows, size), group_of(group, size)
    states, twin = states_of(rows, mix), states_of(rows, mix)
    expected = correct_streams_torch(twin, mix, correction)
    with at_level(level):
        first = correct_streams(states, mix, correction, dtype, own)
        check(first, expected, own, atol=1e-4)  # it reads the level's tiles
    torch.testing.assert_close(states, twin, rtol=1e-5, atol=1e-4)
    assert torch.equal(states[:, -5:], twin[:, -5:])


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_streams_is_the_same_alone_and_keeps_bad_values_to_itself(level: str) -> None:
    mix, correction = mix_of(5, 4, 576, corrects=True), correction_of(5, 576)
    together = states_of(5, mix)
    together[3, 600] = torch.nan
    alone = together.clone()
    with at_level(level):
        all_first = unquantised(correct_streams(together, mix, correction, torch.float32))
        for row in range(5):
            one = slice(row, row + 1)
            own = replace(correction, activated=correction.activated[one])
            first = correct_streams(alone[one], replace(mix, logits=mix.logits[one]), own, torch.float32)
            torch.testing.assert_close(unquantised(first)[0], all_first[row], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(alone, together, rtol=0, atol=0, equal_nan=True)
    assert int(together.isnan().sum()) == 1


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 1e-4, 0.0])  # the last two have less than the least magnitude
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", LEVELS or [None])
def test_rows_get_the_magnitude_of_others(
    level: str | None, size: int, spread: float, dtype: torch.dtype, add: bool
) -> None:
    x, like = rows_of(6, size + 3, spread)[:, 2 : 2 + size].to(dtype), rows_of(6, size + 4, seed=1)[:, :size]
    out = rows_of(6, size + 6, seed=2)
    wide, before = x.double(), out.clone()
    floored = wide.square().mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    meant = wide * like.double().square().mean(-1, keepdim=True).sqrt() / floored
    torch.testing.assert_close(match_rows_torch(x, like, 1e-5), meant.float(), rtol=1e-5, atol=1e-6)
    if level is not None:
        with at_level(level):
            match_rows(out[:, 3 : 3 + size], x, like, 1e-5, add)
        expected = meant.float() + (before[:, 3 : 3 + size] if add else 0)
        torch.testing.assert_close(out[:, 3 : 3 + size], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(out[:, :3], before[:, :3]) and torch.equal(out[:, 3 + size :], before[:, 3 + size :])
