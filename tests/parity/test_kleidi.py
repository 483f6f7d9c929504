"""KleidiAI's product is that of the codes it was given, within what its own rounding of activations may cost."""

from __future__ import annotations

import pytest
import torch

from app.kernels.linear.quantization import quantise_int4
from app.kernels.linear.torch_int import KleidiFactory, KleidiLinear

GROUPS = [32, 64, 128, None]


def test_it_suits_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.kernels.linear.torch_int._is_available", lambda: False)
    assert not KleidiFactory(64).supports(512, 512, torch.bfloat16)
    monkeypatch.setattr("app.kernels.linear.torch_int._is_available", lambda: True)
    assert KleidiFactory(64).supports(512, 576, torch.bfloat16)
    assert not KleidiFactory(128).supports(512, 576, torch.bfloat16)
    assert KleidiFactory(None).supports(512, 576, torch.bfloat16)
    assert not KleidiFactory(None).supports(512, 1001, torch.bfloat16)


@pytest.mark.arm64
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("with_bias", [False, True])
@torch.inference_mode()
def test_products_are_those_of_the_codes(group: int | None, with_bias: bool) -> None:
    packing, generator = KleidiFactory(group), torch.Generator().manual_seed(1)
    assert packing.supports(100, 896, torch.bfloat16)
    weight = quantise_int4(torch.randn(100, 896, generator=generator) / 30, group or 896, zero_points=False)
    bias = torch.randn(100, generator=generator) if with_bias else None
    form = KleidiLinear(weight, bias)
    x = torch.randn(17, 896, generator=generator)
    exact = x @ weight.dequantise().T + (0 if bias is None else bias)
    for rows in (0, 1, 2, 17):
        for dtype in (torch.float32, torch.bfloat16):
            product = form.multiply(x[:rows].to(dtype))
            assert product.dtype == dtype and product.shape == (rows, 100)
            assert _near(product.float(), exact[:rows])
    hidden = torch.ones(17, 100)
    form.add_to(hidden, x)
    assert _near(hidden - 1, exact)
    assert 0.5 * weight.codes.numel() < form.nbytes < 0.75 * weight.codes.numel()


def _near(product: torch.Tensor, exact: torch.Tensor) -> bool:
    """The root mean square of the error below 2% of that of the product: 255 steps over a row's range cost 0.7%."""
    return bool((product - exact).norm() <= 0.02 * exact.norm())


@pytest.mark.arm64
@torch.inference_mode()
def test_rows_that_lie_apart_and_a_weight_that_is_reused() -> None:
    weight, wide = torch.randn(64, 128).bfloat16(), torch.randn(5, 300).bfloat16()
    form = KleidiFactory(32).pack(weight, None)
    x = wide[:, :128]
    before = form.multiply(x)
    assert torch.equal(form.multiply(x.contiguous()), before)
    weight.zero_()
    assert torch.equal(form.multiply(x), before)
