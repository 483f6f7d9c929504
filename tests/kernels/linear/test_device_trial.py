"""The kernel for few rows is used for as many rows as a trial found it right and faster for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from armature_kernels.linear import device_trial
from armature_kernels.linear.device import DeviceFactory, DeviceForm
from armature_kernels.linear.device_fp8 import DeviceFp8Factory
from armature_kernels.linear.device_int8 import DeviceInt8Factory

pytest.importorskip("triton", reason="Triton is not installed")
from tiled_codes import fresh_scratch

HERE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
BF16 = torch.bfloat16


class Timed:
    """Stands for the clock of a GPU: the kernel takes `seconds` by its rows, products without it 1. Counts trials."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.trials, self.rows = seconds, 0, 0

    def __call__(self, work: Callable[[], list[Tensor]], device: torch.device) -> float:
        products = work()
        self.trials += 1
        is_kernel = self.trials % 2 == 0  # each trial measures without it first
        return len(products) * (self.seconds[f"rows{len(products[0])}"] if is_kernel else 1.0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    def use(**seconds: float) -> Timed:
        clock = Timed(**seconds)
        monkeypatch.setattr(device_trial, "graph_seconds", clock)
        return clock

    monkeypatch.setattr(device_trial, "_found", {})
    monkeypatch.setattr(device_trial, "_BYTES", 2**10)
    monkeypatch.setattr(device_trial, "triton_usable", lambda tensor: True)
    for module in ("device_int8", "device_fp8"):
        monkeypatch.setattr(f"armature_kernels.linear.{module}.shared_scratch", fresh_scratch())
    return use


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"rows1": 0.5, "rows4": 0.9}, 4),
        ({"rows1": 0.5, "rows4": 1.1}, 1),
        ({"rows1": 1.1, "rows4": 1.1}, 0),
    ],
)
def test_as_many_rows_as_are_faster(
    timed: Callable[..., Timed], seconds: dict[str, float], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = timed(**seconds)
    with caplog.at_level("INFO"):
        forms = [DeviceFactory(HERE, BF16).empty_form(8, 64, None) for _ in "ab"]
    assert [form.few_rows for form in forms] == [expected] * 2
    assert clock.trials == (2 if expected == 4 else 4), "one trial serves all weights of a size"
    assert [form.takes_unnormed(rows) for rows in (0, 1, 4, 5) for form in forms[:1]] == [
        False,
        expected >= 1,
        expected >= 4,
        False,
    ]
    assert "Products of 4 rows with [8, 64] by DeviceFactory" in caplog.text


@pytest.mark.parametrize("kind", [DeviceInt8Factory, DeviceFp8Factory])
def test_codes_have_a_trial_too(timed: Callable[..., Timed], kind: type[DeviceInt8Factory]) -> None:
    timed(rows1=0.5, rows4=0.5)
    assert kind(HERE, BF16).empty_form(8, 64, None).few_rows == 4
    assert DeviceFp8Factory(HERE, BF16, (8, 32)).empty_form(8, 64, None).few_rows == 4


def test_a_wrong_kernel_is_not_used(timed: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch) -> None:
    timed(rows1=0.5, rows4=0.5)
    right = DeviceForm._multiply_few

    def wrong(form: DeviceForm, x: Tensor, out: Tensor, activation: str = "", adds: bool = False) -> Tensor:
        product = right(form, x, out, activation, adds)
        product[0, 7] = torch.nan
        return product

    monkeypatch.setattr(DeviceForm, "_multiply_few", wrong)
    assert DeviceFactory(HERE, BF16).empty_form(8, 64, None).few_rows == 0


def test_what_the_kernel_cannot_read_has_no_trial(timed: Callable[..., Timed]) -> None:
    clock = timed(rows1=0.5, rows4=0.5)
    assert DeviceFactory(HERE, torch.float32).empty_form(8, 64, None).few_rows == 0
    assert DeviceFactory(HERE, BF16).empty_form(8, 72, None).few_rows == 0
    assert DeviceFp8Factory(HERE, BF16, (8, 8)).empty_form(8, 64, None).few_rows == 0
    assert clock.trials == 0


def test_nothing_is_tried_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trial, "_found", {})
    monkeypatch.setattr(device_trial, "triton_usable", lambda tensor: False)
    assert DeviceFactory(HERE, BF16).empty_form(8, 64, None).few_rows == 0
