"""Made-up weights on a device: of the sizes and forms that loading would make, made where they lie, and no two alike."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from app.engine import made_up
from app.engine.made_up import Forms, table_of
from app.kernels.device_int4 import DeviceInt4Linear
from app.kernels.device_linear import DeviceLinear
from app.kernels.linear import Linear
from app.weights.choice import Choice
from app.weights.recipes import DEVICE_INT4

CPU = torch.device("cpu")


def linears() -> list[Linear]:
    shapes = {"a": (64, 128), "b": (24, 100), "lm_head": (40, 128)}
    return [Linear((name,), inputs, outputs, bias=name == "a") for name, (outputs, inputs) in shapes.items()]


@torch.inference_mode()
def test_a_devices_forms_are_filled_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up, "NOISE_ELEMENTS", 1000)  # so that each is made in parts
    forms = Forms(Choice(DEVICE_INT4, torch.bfloat16, False, device=CPU))
    a, b, output = (forms.of(linear) for linear in linears())
    assert isinstance(a, DeviceInt4Linear) and isinstance(b, DeviceLinear) and isinstance(output, DeviceLinear)
    assert a.bias is not None and a.packed.numel() == 64 * 128 // 8 and a.packed.unique().numel() > 500
    for weight in (b.weight, output.weight, a.written_out()):
        assert weight.isfinite().all() and 0.3 < weight.float().std() / made_up.WEIGHT < 3
    assert torch.equal(cast(DeviceLinear, Forms(forms.choice).of(linears()[1])).weight, b.weight)  # the same at each start


def test_what_a_product_reads_is_counted_in_its_form() -> None:
    forms = Forms(Choice(DEVICE_INT4, torch.bfloat16, False, device=CPU))
    assert forms.sizes(linears()) == (64 * 128 * 9 // 16 + 2 * 24 * 100, 2 * 40 * 128)


def test_a_table_is_made_where_it_is_looked_up() -> None:
    assert table_of(3, 4).device.type == "cpu" and table_of(3, 4, torch.device("meta")).is_meta
