"""Products of LoRA adapters: the kernel at every level against torch, and rows of several adapters against each alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.linear.activations import RowGroups, quantise
from armature_kernels.linear.layout import lora_elements
from armature_kernels.linear.lora import LoraProduct, LoraRows, LoraSlots, LoraWeights, RowRun
from native_levels import at_level, levels

DTYPES = (torch.bfloat16, torch.float32)


def make_product(
    inputs: int, outputs: Sequence[int], ranks: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> tuple[LoraProduct, LoraRows]:
    """Return a product with one adapter for each of `ranks`; rank 0: it has no weights in the first source."""
    torch.manual_seed(seed)
    rows = LoraRows(256)
    product = LoraProduct(rows, inputs, outputs, LoraSlots(len(ranks), max(*ranks, 1), dtype))
    for slot, rank in enumerate(ranks):
        for source, count in enumerate(outputs):
            if rank or source:
                a, b = torch.randn(max(rank, 1), inputs) / inputs**0.5, torch.randn(count, max(rank, 1))
                product.set_weights(slot, source, LoraWeights.pack(a, b, dtype))
    return product, rows


def added(
    product: LoraProduct, x: Tensor, num_outputs: int, dtype: torch.dtype, group: RowGroups | None = None
) -> Tensor:
    y = torch.ones(len(x), num_outputs, dtype=dtype)
    product.add(y, x if group is None else quantise(x, group))
    return y


RUNS: Sequence[RowRun] = ((0, 0, 3), (None, 3, 2), (2, 5, 9), (1, 14, 1), (0, 15, 4))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, (96, 32, 32)), (576, (24,)), (1100, (70, 33))])
def test_adding_equals_the_reference(level: str, dtype: torch.dtype, inputs: int, outputs: tuple[int, ...]) -> None:
    with at_level(level):
        product, rows = make_product(inputs, outputs, (16, 0, 5), dtype)
        rows.fill(RUNS, RUNS, 19)
        x = torch.randn(19, inputs).to(dtype)
        y = added(product, x, sum(outputs), torch.float32)
        expected = torch.ones(19, sum(outputs))
        product.add_torch(expected, x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert (y[3:5] == 1).all()
        assert not torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("group", [RowGroups(32), RowGroups(32, 4), RowGroups(64), RowGroups(576)])
def test_quantised_rows_are_dequantised(level: str, group: RowGroups) -> None:
    with at_level(level):
        product, rows = make_product(576, (40, 33), (8, 16, 3), torch.bfloat16)
        rows.fill(RUNS, RUNS, 19)
        x = torch.randn(19, 576).bfloat16()
        expected = torch.ones(19, 73)
        product.add_torch(expected, quantise(x, group))
        torch.testing.assert_close(added(product, x, 73, torch.float32, group), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", levels())
def test_results_in_bf16_are_rounded_once(level: str) -> None:
    with at_level(level):
        product, rows = make_product(128, (50,), (4, 4, 4), torch.bfloat16)
        rows.fill(RUNS, RUNS, 19)
        x = torch.randn(19, 128).bfloat16()
        exact = added(product, x, 50, torch.float32)
        torch.testing.assert_close(added(product, x, 50, torch.bfloat16), exact.bfloat16(), rtol=0, atol=0)


@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=24), st.integers(0, 3))
def test_a_row_is_the_same_in_every_mixture(slots: list[int | None], seed: int) -> None:
    product, rows = make_product(80, (36, 20), (16, 1, 7), torch.bfloat16, seed)
    x = torch.randn(len(slots), 80)
    runs = [(slot, row, 1) for row, slot in enumerate(slots)]
    rows.fill(runs, runs, len(slots))
    together = added(product, x, 56, torch.float32)
    for row, slot in enumerate(slots):
        rows.fill([(slot, 0, 1)], [(slot, 0, 1)], 1)
        assert torch.equal(added(product, x[row : row + 1], 56, torch.float32)[0], together[row])


def test_rows_that_the_last_layer_needs_have_their_own_list() -> None:
    product, rows = make_product(64, (32,), (4, 4), torch.float32)
    x = torch.randn(5, 64)
    rows.fill([(0, 0, 3), (1, 3, 2)], [(0, 0, 1), (1, 1, 1)], 5)
    whole = added(product, x, 32, torch.float32)
    wanted = added(product, x[[2, 4]], 32, torch.float32)
    assert torch.equal(wanted, whole[[2, 4]])


def test_weights_are_removed() -> None:
    product, rows = make_product(64, (32,), (4, 4), torch.float32)
    rows.fill([(1, 0, 2)], [(1, 0, 2)], 2)
    x = torch.randn(2, 64)
    assert not torch.equal(added(product, x, 32, torch.float32), torch.ones(2, 32))
    product.set_weights(1, 0, None)
    assert torch.equal(added(product, x, 32, torch.float32), torch.ones(2, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_have_the_predicted_bytes_and_can_be_read_back(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 70).to(dtype), torch.randn(37, 5).to(dtype)
    packed = LoraWeights.pack(a, b, dtype)
    assert packed.nbytes == dtype.itemsize * lora_elements(5, 37, 70)
    read = packed.unpacked()
    assert torch.equal(read[0], a.float())
    assert torch.equal(read[1], b.float())
