"""Products in fp32 against torch at every level: fp32 weights, and bf16 weights that are widened while they are read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from armature_kernels.elementwise.activations import ACTIVATIONS, TopLogitsRequest
from armature_kernels.linear import fp32_panels
from armature_kernels.linear.fp32_panels import Fp32PanelFactory, Fp32PanelLinear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level
from row_checks import LEVELS, a_level, bad_values, bits, needs_levels, rows_of

DTYPES = (torch.float32, torch.bfloat16)
some_rows = st.integers(1, 60) | st.sampled_from([1, 2, 6, 12, 13, 24, 300])
some_inputs = st.sampled_from([1, 2, 7, 64, 191, 192, 193, 385, 576, 1000])


def form_of(dtype: torch.dtype, outputs: int, inputs: int, bias: bool = True) -> tuple[Fp32PanelLinear, torch.Tensor]:
    weight = rows_of(outputs, inputs, inputs**-0.5, seed=5).to(dtype)
    return Fp32PanelFactory(dtype).pack(weight, rows_of(1, outputs, seed=6)[0] if bias else None), weight


@needs_levels
@settings(max_examples=examples(150), deadline=None)
@given(
    level=a_level, dtype=st.sampled_from(DTYPES), rows=some_rows, inputs=some_inputs, outputs=st.integers(1, 200),
    bias=st.booleans(), bad=bad_values, gap=st.sampled_from([0, 3]),
)  # fmt: skip
def test_products_equal_torchs(
    level: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, bad: float | None, gap: int
) -> None:
    x = rows_of(rows, inputs + gap, bad=bad).to(dtype)[:, :inputs]
    with at_level(level):
        assume(has_kernel(OpCode.LINEAR_FP32))
        form, weight = form_of(dtype, outputs, inputs, bias)
        found, hidden = form.multiply(x), rows_of(rows, outputs, seed=8)
        sums = hidden.clone()
        form.add_to(sums, x)
    meant = F.linear(x.double(), weight.double(), None if form.bias is None else form.bias.double()).float()
    assert found.dtype == dtype
    near = {"rtol": 1e-5, "atol": 2e-5, "equal_nan": True}
    torch.testing.assert_close(sums, hidden + meant, **near)
    torch.testing.assert_close(found, meant.to(dtype), **(near if dtype == torch.float32 else {**near, "rtol": 2**-7}))


@needs_levels
@settings(max_examples=examples(30), deadline=None)
@given(level=a_level, dtype=st.sampled_from(DTYPES), rows=st.integers(2, 70), inputs=some_inputs)
def test_a_row_is_the_same_to_the_bit_in_any_company_and_with_any_threads(
    level: str, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    x, threads = rows_of(rows, inputs).to(dtype), torch.get_num_threads()
    with at_level(level):
        assume(has_kernel(OpCode.LINEAR_FP32))
        form, _ = form_of(dtype, 1100, inputs)
        together = form.multiply(x)
        try:
            torch.set_num_threads(3 - min(threads, 2))
            assert torch.equal(form.multiply(x), together)
        finally:
            torch.set_num_threads(threads)
        for row in {0, rows // 2, rows - 1}:
            (alone,), (meant,) = bits(form.multiply(x[row : row + 1])), bits(together)
            assert torch.equal(alone[0], meant[row])


@needs_levels
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("level", LEVELS)
def test_an_activation_is_applied_to_the_sums(level: str, activation: str) -> None:
    x = rows_of(5, 96)
    with at_level(level):
        form, weight = form_of(torch.float32, 70, 96)
        found = form.multiply_activated(x, activation)
    meant = ACTIVATIONS[activation](F.linear(x, weight, form.bias))
    torch.testing.assert_close(found, meant, rtol=2e-5, atol=3e-5)


@needs_levels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_fused_weight_is_filled_in_parts_and_its_rows_are_read_back(level: str, dtype: torch.dtype) -> None:
    weight = rows_of(100, 33, seed=3).to(dtype)
    with at_level(level):
        form = Fp32PanelFactory(dtype).empty_form(100, 33, None)
        for first, last in ((0, 45), (45, 47), (47, 100)):
            form.fill(first, weight[first:last].clone())
        ids = torch.tensor([99, 0, 46, 100, -1])
        found = form.rows(ids, 2.0)
    assert torch.equal(found[:3], 2 * weight[ids[:3]].float())
    assert found[3:].isnan().all()


@needs_levels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("together", [64, 4])
def test_top_logits_are_those_of_all_logits(
    level: str, dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp32_panels, "_LOGIT_ROWS", together)
    x = rows_of(11, 64, seed=2).to(dtype)
    with at_level(level):
        form, _ = form_of(dtype, 2500, 64)
        logits = torch.zeros(11, 2500)
        form.add_to(logits, x)
        best = form.top_logits(x, TopLogitsRequest(5, True))
        capped = form.top_logits(x, TopLogitsRequest(5), softcap=3.0)
        alone = form.top_logits(x[7:8], TopLogitsRequest(5, True))
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best.values, values[:, :5]) and torch.equal(best.ids, ids[:, :5])
    assert best.logsumexp is not None and alone.logsumexp is not None
    torch.testing.assert_close(best.logsumexp, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(capped.values, 3 * torch.tanh(values[:, :5] / 3), rtol=1e-5, atol=1e-5)
    assert torch.equal(alone.values[0], best.values[7]) and torch.equal(alone.logsumexp[0], best.logsumexp[7])


@needs_levels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_broken_row_has_nan_as_its_best_and_stays_alone(level: str, bad: float) -> None:
    x = rows_of(9, 64, seed=2)
    with at_level(level):
        form, _ = form_of(torch.float32, 700, 64)
        whole = form.top_logits(x, TopLogitsRequest(3))
        x[6, 5] = bad
        x[6, 6] = -bad
        broken = form.top_logits(x, TopLogitsRequest(3))
    others = [row for row in range(9) if row != 6]
    assert broken.values[6, 0].isnan()
    assert torch.equal(broken.values[others], whole.values[others])
