"""Each packed form against the plain product, and what a form says of itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from armature_kernels.linear import linear
from armature_kernels.linear.linear import FORMS, Linear, OneDnnLinear, PlainLinear

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 129])
@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_forms_equal_the_plain_product(name: str, rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    """FP32 within the order of sums; BF16 within two roundings of the exact product."""
    if not FORMS[name].supports(2**9, 2**9, dtype):
        pytest.skip("this machine does not have it")
    generator = torch.Generator().manual_seed(rows)
    weight, x = (
        torch.randn(515, 130, generator=generator).to(dtype),
        torch.randn(rows, 130, generator=generator).to(dtype),
    )
    bias = torch.randn(515, generator=generator).to(dtype) if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    form = FORMS[name].pack(weight.clone(), bias)
    product = form.multiply(x)
    assert product.dtype == dtype and product.shape == (rows, 515)
    torch.testing.assert_close(
        product.double(),
        exact,
        **({"atol": 1e-4, "rtol": 0} if dtype == torch.float32 else {"atol": 0.05, "rtol": 2**-7}),
    )
    assert weight.nbytes <= form.nbytes <= 1.3 * weight.nbytes  # blocks may be padded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_forms_take_rows_that_lie_apart(name: str, dtype: torch.dtype) -> None:
    if not FORMS[name].supports(512, 256, dtype):
        pytest.skip("this machine does not have it")
    weight, wide = torch.randn(512, 256).to(dtype), torch.randn(5, 300).to(dtype)
    product = FORMS[name].pack(weight, None).multiply(wide[:, :256])
    torch.testing.assert_close(
        product, wide[:, :256].contiguous() @ weight.T, atol=1e-3 if dtype == torch.float32 else 0.5, rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_a_form_that_does_not_keep_its_weight_has_its_own(name: str, dtype: torch.dtype) -> None:
    """The loader reuses the buffer it packed from."""
    form = FORMS[name]
    if not form.supports(512, 256, dtype):
        pytest.skip("this machine does not have it")
    weight, bias, x = torch.randn(512, 256).to(dtype), torch.randn(512).to(dtype), torch.ones(1, 256, dtype=dtype)
    packed = form.pack(weight, bias)
    before = packed.multiply(x).clone()
    for used in (weight, bias):
        used.zero_()
    assert torch.equal(packed.multiply(x), before) != form.keeps_weight


def test_onednn_suits_large_weights_of_dtypes_that_the_machine_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_onednn_packs", lambda dtype: dtype == torch.float32)
    assert OneDnnLinear.supports(1024, 1024, torch.float32)
    assert not OneDnnLinear.supports(256, 256, torch.float32)
    assert not OneDnnLinear.supports(1024, 1024, torch.bfloat16)
    assert PlainLinear.supports(1, 1, torch.bfloat16)


def test_a_linear_layer_multiplies_by_its_form() -> None:
    layer = Linear(("model.a", "model.b"), 4, 6)
    layer.form = PlainLinear(torch.eye(6, 4), None)
    assert layer(torch.ones(2, 4)).tolist() == [[1.0, 1, 1, 1, 0, 0]] * 2
