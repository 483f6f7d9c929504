"""The best outputs straight from the product are those of the logits written out: same values bit for bit, lower ids first among equals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.linear.bf16_product import WideRows
from armature_kernels.linear.fp32_panels import Fp32PanelFactory
from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.TOP_LOGITS), reason="no native kernels here")


def _logits(form: IntPanelLinear, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), form.outputs)
    form.add_to(y, x)
    return y


def _best_of(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def _form(outputs: int, inputs: int, seed: int, bits: int = 4) -> IntPanelLinear:
    torch.manual_seed(seed)
    return IntPanelFactory(bits, 32 if bits == 4 else None, wide=WideRows.NEVER).pack(
        torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    )


def _same(best: TopLogits, logits: Tensor, k: int) -> None:
    values, ids = _best_of(logits, k)
    assert torch.equal(best.values, values)
    assert torch.equal(best.ids, ids)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(1, 30), st.integers(1, 9000), st.integers(1, 64), st.sampled_from([4, 8]), st.integers(0, 99))
def test_best_are_the_best_of_the_logits(rows: int, outputs: int, k: int, bits: int, seed: int) -> None:
    k = min(k, outputs)
    form, x = _form(outputs, 96, seed, bits), torch.randn(rows, 96).bfloat16()
    best, logits = form.top_logits(x, TopLogitsRequest(k, True)), _logits(form, x)
    _same(best, logits, k)
    assert best.logsumexp is not None
    torch.testing.assert_close(best.logsumexp, logits.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_equals_come_by_id() -> None:
    form = IntPanelFactory(4, 32).pack(torch.ones(3000, 64), None)
    best = form.top_logits(torch.ones(3, 64).bfloat16(), TopLogitsRequest(8))
    assert best.ids.tolist() == [list(range(8))] * 3


def test_a_soft_cap_bends_the_values() -> None:
    form, x = _form(700, 64, 3), 30 * torch.randn(5, 64).bfloat16()
    best, logits = form.top_logits(x, TopLogitsRequest(4), softcap=5.0), 5 * torch.tanh(_logits(form, x) / 5)
    torch.testing.assert_close(best.values, _best_of(logits, 4)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_shows_and_stays_alone(bad: float) -> None:
    form, x = _form(700, 64, 4), torch.randn(11, 64).bfloat16()
    whole = form.top_logits(x, TopLogitsRequest(3))
    x[6, 5] = bad
    broken = form.top_logits(x, TopLogitsRequest(3))
    assert broken.values[6, 0].isnan()
    others = [row for row in range(11) if row != 6]
    assert torch.equal(broken.values[others], whole.values[others])


def test_a_row_does_not_depend_on_the_others_nor_on_threads() -> None:
    form, x = _form(9001, 128, 5), torch.randn(23, 128).bfloat16()  # several panels in turns
    together, threads = form.top_logits(x, TopLogitsRequest(5, True)), torch.get_num_threads()
    for other in (1, 2):
        torch.set_num_threads(other)
        try:
            alone = [form.top_logits(x[row : row + 1], TopLogitsRequest(5, True)) for row in range(23)]
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(together.values, torch.cat([one.values for one in alone]))
        assert torch.equal(together.logsumexp, torch.cat([one.logsumexp for one in alone]))  # type: ignore[arg-type, misc]


def test_logits_are_what_the_product_writes() -> None:
    form, x = _form(100, 64, 6), torch.randn(2, 64).bfloat16()
    assert (form.multiply(x).dtype, _logits(form, x).dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(form.multiply(x).float(), _logits(form, x), atol=0.05, rtol=0.01)


@dataclass(eq=False)
class Masks:
    """Random masks, of which some rows allow few outputs and some panels none."""

    words: Tensor
    outputs: int

    def allowed(self, num_rows: int) -> Tensor:
        bits = (self.words[:num_rows].unsqueeze(-1) >> torch.arange(32)) & 1
        return bits.flatten(1)[:, : self.outputs].bool()


def masks_of(rows: int, outputs: int, seed: int) -> Masks:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-outputs // 32)), generator=generator, dtype=torch.int32)
    return Masks(words * (torch.rand(words.shape, generator=generator) < 0.4), outputs)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(1, 30), st.integers(1, 9000), st.integers(1, 64), st.booleans(), st.booleans(), st.integers(0, 99))
def test_only_allowed_outputs_are_selected(
    rows: int, outputs: int, k: int, is_float: bool, with_sums: bool, seed: int
) -> None:
    k = min(k, outputs)
    x, masks = torch.randn(rows, 96).bfloat16(), masks_of(rows, outputs, seed)
    form: Any = _form(outputs, 96, seed)
    if is_float:
        torch.manual_seed(seed)
        form = Fp32PanelFactory(torch.float32).pack(torch.randn(outputs, 96) / 10, None)
    best = form.top_logits(x, TopLogitsRequest(k, with_sums, masks))
    if is_float:
        plain = form._logits(x)
    else:
        plain = _logits(form, x)
    masked = plain.masked_fill(~masks.allowed(rows), -torch.inf)
    values, ids = _best_of(masked, k)
    assert torch.equal(best.values, values)
    possible = values > -torch.inf
    assert torch.equal(best.ids[possible], ids[possible])
    if with_sums:
        torch.testing.assert_close(best.logsumexp, plain.logsumexp(-1), atol=1e-5, rtol=1e-5)
