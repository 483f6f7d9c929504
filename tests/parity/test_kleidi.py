"""KleidiAI's product, through torchao, is that of the codes, within what its own rounding of activations may cost."""

from __future__ import annotations

import pytest
import torch

from armature_kernels.linear.torchao_config import KLEIDI_INT4
from armature_kernels.linear.torchao_linear import TorchaoFactory

GROUPS = [32, None]


def test_it_suits_where_torch_has_it() -> None:
    available = torch.backends.kleidiai.is_available()  # type: ignore[no-untyped-call]
    for name in KLEIDI_INT4.values():
        assert TorchaoFactory(name).supports(512, 576, torch.bfloat16) == available
        if not available:
            assert "kleidiai.is_available()" in TorchaoFactory(name).refusal()
    assert not TorchaoFactory(KLEIDI_INT4[32]).supports(512, 1001, torch.bfloat16)


@pytest.mark.arm64
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("with_bias", [False, True])
@torch.inference_mode()
def test_products_are_those_of_the_codes(group: int | None, with_bias: bool) -> None:
    factory, generator = TorchaoFactory(KLEIDI_INT4[group]), torch.Generator().manual_seed(1)
    assert factory.supports(96, 896, torch.bfloat16)
    weight = torch.randn(96, 896, generator=generator) / 30
    bias = torch.randn(96, generator=generator) if with_bias else None
    form, codes = factory.pack(weight, bias), _unpacked(group).pack(weight, None)
    x = torch.randn(17, 896, generator=generator)
    exact = x @ codes.module.weight.dequantize().T + (0 if bias is None else bias)
    for rows in (0, 1, 2, 17):
        for dtype in (torch.float32, torch.bfloat16):
            product = form.multiply(x[:rows].to(dtype))
            assert product.dtype == dtype and product.shape == (rows, 96)
            assert _near(product.float(), exact[:rows])
    hidden = torch.ones(17, 96)
    form.add_to(hidden, x)
    assert _near(hidden - 1, exact)
    assert 0.5 * weight.numel() < form.nbytes < 0.75 * weight.numel()


def _unpacked(group: int | None) -> TorchaoFactory:
    """The same codes as a tensor that can be dequantized, with FP32 scales as KleidiAI has them."""
    name = KLEIDI_INT4[group].replace("opaque_aten_kleidiai", "unpacked_to_int8")
    return TorchaoFactory(name, dtype=torch.float32)


def _near(product: torch.Tensor, exact: torch.Tensor) -> bool:
    """The root mean square of the error below 2% of that of the product: 255 steps over a row's range cost 0.7%."""
    return bool((product - exact).norm() <= 0.02 * exact.norm())


@pytest.mark.arm64
@torch.inference_mode()
def test_rows_that_lie_apart_and_a_weight_that_is_reused() -> None:
    weight, wide = torch.randn(64, 128).bfloat16(), torch.randn(5, 300).bfloat16()
    form = TorchaoFactory(KLEIDI_INT4[32]).pack(weight, None)
    x = wide[:, :128]
    before = form.multiply(x)
    assert torch.equal(form.multiply(x.contiguous()), before)
    weight.zero_()
    assert torch.equal(form.multiply(x), before)
