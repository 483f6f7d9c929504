"""Synthetic weights on a device: the sizes and forms of loaded weights, created in place, all different."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from app.engine.calibration import synthetic_weights
from app.engine.calibration.synthetic_weights import SyntheticForms, SyntheticMemory, synthetic_table
from app.weights.form_choice import CacheableForm, FormChoice
from app.weights.forms import DEVICE_INT4, find_recipe
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.device_int4 import DeviceInt4Linear
from armature_kernels.linear.fp32_panels import FloatPanelLinear
from armature_kernels.linear.linear import Linear, LinearForm
from armature_kernels.linear.torchao_config import INT8_REFERENCE
from armature_kernels.linear.torchao_linear import TorchaoLinear

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


@torch.inference_mode()
@pytest.mark.parametrize("precision", ["int4", "bf16", "fp32"])
def test_trials_use_the_same_memory_one_after_another(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = FormChoice(
        find_recipe("cpu", "x86_64", precision), torch.float32 if precision == "fp32" else torch.bfloat16, True
    )

    def spans(memory: SyntheticMemory) -> list[tuple[int, int]]:
        forms = SyntheticForms(choice, memory)
        parts = [part for linear in linears() for part in weight_parts(forms.form(linear))]
        assert all(bool((part.view(torch.uint8) == synthetic_weights.FILL_BYTE).all()) for part in parts)
        return sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)

    memory = SyntheticMemory()
    first = spans(memory)
    assert spans(memory) == first
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(first)), "products share no bytes"
    monkeypatch.setattr(synthetic_weights, "REGION_BYTES", 5000)
    assert spans(memory) != first, "what does not fit is allocated on its own"


def weight_parts(form: LinearForm) -> Sequence[torch.Tensor]:
    """Return the tensors of a form's weight."""
    if isinstance(form, FloatPanelLinear):
        return [form.panels]
    assert isinstance(form, CacheableForm)
    return form.parts


def test_a_table_is_made_where_it_is_looked_up() -> None:
    assert synthetic_table(3, 4).device.type == "cpu" and synthetic_table(3, 4, torch.device("meta")).is_meta
