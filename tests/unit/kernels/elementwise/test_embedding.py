"""Embedding rows and rotary angles against their torch references at every level of this processor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.elementwise.embedding import add_embedding_rows, embedding_rows, embedding_rows_torch
from armature_kernels.elementwise.rope import rope_angles, rope_angles_torch
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, HybridFactory
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level, levels

LEVELS = levels()
needs_levels = pytest.mark.skipif(not LEVELS, reason="no native library")
a_level = st.sampled_from(LEVELS or ("none",))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def table_of(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)).to(dtype)


@needs_levels
@settings(max_examples=examples(60), deadline=None)
@given(
    level=a_level, outputs=st.integers(1, 70), inputs=st.sampled_from([1, 7, 64, 255, 257, 600]), count=st.integers(0, 12),
    dtype=st.sampled_from(DTYPES), factor=st.sampled_from([1.0, 33.94112549695428, None]),
)  # fmt: skip
def test_stored_rows_equal_the_reference_to_the_bit(
    level: str, outputs: int, inputs: int, count: int, dtype: torch.dtype, factor: float | None
) -> None:
    weight = table_of(outputs, inputs, dtype)
    ids = torch.randint(outputs, (count,), generator=torch.Generator().manual_seed(count))
    times = torch.rand(inputs) + 0.5 if factor is None else factor
    with at_level(level):
        assert has_kernel(OpCode.EMBEDDING)
        assert torch.equal(embedding_rows(weight, ids, times), embedding_rows_torch(weight, ids, times))
        hidden = torch.randn(count, inputs)
        meant = hidden + embedding_rows_torch(weight, ids, times)
        add_embedding_rows(hidden, weight, ids, times)
        assert torch.equal(hidden, meant)


@needs_levels
def test_every_half_is_widened_exactly() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 256)
    found, meant = embedding_rows(halves, torch.arange(256)), halves.float()
    assert torch.equal(found.isnan(), meant.isnan())
    assert torch.equal(found.nan_to_num(0.5).view(torch.int32), meant.nan_to_num(0.5).view(torch.int32))


@needs_levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, None)])
def test_packed_rows_take_a_factor_an_input(level: str, bits: int, group: int | None) -> None:
    ids, factors = torch.tensor([69, 0, 31, 32, 5]), torch.rand(200) + 0.5
    with at_level(level):
        form = IntPanelFactory(bits, group).pack(table_of(70, 200, torch.float32), None)
        assert torch.equal(form.rows(ids, factors), form.rows(ids) * factors)
        assert torch.equal(form.rows(ids, 3.5), form.rows(ids) * 3.5)
        assert torch.equal(form.rows(ids), form.dequantised()[ids])


@needs_levels
def test_an_id_that_no_row_has_reads_nothing() -> None:
    weight, ids = table_of(40, 64, torch.float32), torch.tensor([40, 3, -1, 2**62, -(2**62)])
    four, eight = IntPanelFactory(4, 32), IntPanelFactory(8, None)
    forms = [four.pack(weight, None), HybridFactory(four, eight, 2).pack(weight, None)]
    found = [form.rows(ids) for form in forms] + [embedding_rows(weight.to(dtype), ids, 2.0) for dtype in DTYPES]
    if has_kernel(OpCode.LINEAR_BF16):
        found.append(Bf16PanelLinear.pack(weight, None).rows(ids))
    for rows in found:
        assert rows[[0, 2, 3, 4]].isnan().all()
        assert rows[1].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])  # without a kernel, ids are replaced before
def test_an_id_that_no_row_has_may_have_the_first_row(dtype: torch.dtype) -> None:
    weight, ids = table_of(40, 64, dtype), torch.tensor([40, 3, -1, 2**62, -(2**62)])
    found = embedding_rows(weight, ids, 2.0, absent_first=True)
    assert torch.equal(found, 2 * weight.float()[[0, 3, 0, 0, 0]])


@needs_levels
@settings(max_examples=examples(60), deadline=None)
@given(
    level=a_level, positions=st.lists(st.integers(0, 2**20), max_size=9), half=st.sampled_from([1, 3, 4, 12, 16, 32, 64, 65]),
    theta=st.sampled_from([10.0, 1e4, 5e5]), scale=st.sampled_from([1.0, 1.2079441541679836]),
)  # fmt: skip
def test_angles_are_those_of_the_reference(
    level: str, positions: list[int], half: int, theta: float, scale: float
) -> None:
    where, frequencies = torch.tensor(positions, dtype=torch.int64), 1.0 / theta ** (torch.arange(half) / half)
    with at_level(level):
        assert has_kernel(OpCode.ROPE_ANGLES)
        found = rope_angles(where, frequencies, scale)
    # The twin in fp64, from the angle as it is rounded to fp32.
    turned = (where.float()[:, None, None] * torch.cat((-frequencies, frequencies))).double()
    for mine, meant, twin in zip(
        found, (turned.cos(), turned.sin()), rope_angles_torch(where, frequencies, scale), strict=True
    ):
        torch.testing.assert_close(mine.double(), meant * scale, rtol=2e-7, atol=1e-8)
        torch.testing.assert_close(mine, twin, rtol=0, atol=4e-7)
