"""Synthetic weights on a device: the sizes and forms of loaded weights, created in place, all different."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from app.engine.calibration import synthetic_weights
from app.engine.calibration.synthetic_weights import SyntheticForms, synthetic_table
from app.hardware.plan.torchao_config import INT8_REFERENCE
from app.kernels.linear.device import DeviceLinear
from app.kernels.linear.device_int4 import DeviceInt4Linear
from app.kernels.linear.linear import Linear
from app.kernels.linear.torchao_linear import TorchaoLinear
from app.weights.form_choice import FormChoice
from app.weights.forms import DEVICE_INT4, find_recipe

CPU = torch.device("cpu")


def linears() -> list[Linear]:
    shapes = {"a": (64, 128), "b": (24, 100), "lm_head": (40, 128)}
    return [Linear((name,), inputs, outputs, bias=name == "a") for name, (outputs, inputs) in shapes.items()]


@torch.inference_mode()
def test_a_devices_forms_are_filled_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_weights, "NOISE_ELEMENTS", 1000)  # so that each is made in parts
    forms = SyntheticForms(FormChoice(DEVICE_INT4, torch.bfloat16, False, device=CPU))
    a, b, output = (forms.form(linear) for linear in linears())
    assert isinstance(a, DeviceInt4Linear) and isinstance(b, DeviceLinear) and isinstance(output, DeviceLinear)
    assert a.bias is not None and a.packed.numel() == 64 * 128 // 8 and a.packed.unique().numel() > 500
    for weight in (b.weight, output.weight, a.dequantised()):
        assert weight.isfinite().all() and 0.3 < weight.float().std() / synthetic_weights.FILL_WEIGHT < 3
    assert torch.equal(
        cast(DeviceLinear, SyntheticForms(forms.choice).form(linears()[1])).weight, b.weight
    )  # the same at each start


def test_what_a_product_reads_is_counted_in_its_form() -> None:
    forms = SyntheticForms(FormChoice(DEVICE_INT4, torch.bfloat16, False, device=CPU))
    assert forms.read_sizes(linears()) == (64 * 128 * 9 // 16 + 2 * 24 * 100, 2 * 40 * 128)


@torch.inference_mode()
def test_what_torchao_holds_is_timed_and_counted() -> None:
    forms = SyntheticForms(FormChoice(find_recipe("cpu", "x86_64", INT8_REFERENCE), torch.bfloat16, False))
    layers, output = forms.read_sizes(linears())
    assert isinstance(forms.form(linears()[0]), TorchaoLinear) and output == 2 * 40 * 128
    assert 64 * 128 + 24 * 100 < layers < 1.1 * (64 * 128 + 24 * 100) + 4 * 64


def test_a_table_is_made_where_it_is_looked_up() -> None:
    assert synthetic_table(3, 4).device.type == "cpu" and synthetic_table(3, 4, torch.device("meta")).is_meta
