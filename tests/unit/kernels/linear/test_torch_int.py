"""Torch's own four- and eight-bit products against what the codes mean, and a model that nothing else serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from app.kernels.linear import int_panels
from app.kernels.linear.linear import Linear, PlainLinear
from app.kernels.linear.quantization import quantise_int4, quantise_int8
from app.kernels.linear.torch_int import (
    KleidiFactory,
    KleidiLinear,
    TorchInt4Factory,
    TorchInt4Linear,
    TorchInt8Factory,
    TorchInt8Linear,
)
from loaded_models import load
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import write_checkpoint

PACKINGS = {"int4/32": TorchInt4Factory(32), "int4/64": TorchInt4Factory(64), "int8": TorchInt8Factory()}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("name", PACKINGS)
@torch.inference_mode()
def test_products_are_those_of_what_the_codes_mean(name: str, rows: int, with_bias: bool) -> None:
    """Within a rounding to BF16 or two, of values below 100."""
    packing, generator = PACKINGS[name], torch.Generator().manual_seed(rows)
    weight, wide = torch.randn(48, 192, generator=generator), torch.randn(rows, 200, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if with_bias else None
    assert packing.supports(48, 192, torch.bfloat16)
    rounded = quantise_int8(weight) if name == "int8" else quantise_int4(weight, packing.group, zero_points=False)  # type: ignore[union-attr]
    x = wide[:, :192]  # rows that lie apart
    expected = F.linear(x.float(), rounded.dequantise(), None if bias is None else bias.float())
    form, hidden = packing.pack(weight, bias), torch.ones(rows, 48)
    form.add_to(hidden, x)
    product = form.multiply(x)
    assert product.dtype == torch.bfloat16 and form.activation_group(rows) is None
    for result in (product.float(), hidden - 1):
        torch.testing.assert_close(result, expected, atol=0.1, rtol=2**-6)
    assert form.nbytes <= (1.1 if name == "int8" else 0.66) * weight.numel() + 4 * 48


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (16, 40)])
def test_sizes_that_torch_cannot_pack_are_not_offered(rows: int, columns: int) -> None:
    assert not any(
        packing.supports(rows, columns, torch.bfloat16) for packing in (TorchInt4Factory(64), TorchInt8Factory())
    )


@pytest.mark.parametrize("precision", ["int8", "int4"])
@torch.inference_mode()
def test_without_our_library_a_model_is_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    directory = write_checkpoint(tmp_path, "Qwen2ForCausalLM", hidden_size=64, intermediate_size=120, head_dim=16)
    exact = load(directory)(context_of(list(range(9)), PlainAttend()))
    monkeypatch.setattr(int_panels, "has_kernel", lambda code: False)
    model = load(directory, precision)
    served = model(context_of(list(range(9)), PlainAttend())).float()
    kinds = {type(module.form) for module in model.modules() if isinstance(module, Linear)}
    # On 64-bit Arm the recipe prefers KleidiAI's product, if torch was built with it.
    four = KleidiLinear if KleidiFactory(32).supports(64, 64, torch.bfloat16) else TorchInt4Linear
    # 120 inputs are no whole groups: that weight stays as it was
    # With int4 the output layer and upgraded layers have eight bits.
    assert kinds == {TorchInt8Linear, PlainLinear} | ({four} if precision == "int4" else set())
    assert (served - exact).norm() < (0.06 if precision == "int8" else 0.5) * exact.norm()
