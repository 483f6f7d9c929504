"""Devices whose product adds to a wider stream, and torch's separate addition on the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from armature_kernels.linear import device as device_adds
from armature_kernels.linear import device as device_linear
from armature_kernels.linear.device import DeviceFactory

GPU, HALF = torch.device("cuda", 0), torch.bfloat16


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    supports = device_adds.supports_fused_add  # a test replaces it
    supports.cache_clear()
    yield
    supports.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A GPU whose tensors are the processor's, and whose product adds by the formula; what it was asked to add."""
    seen: list[torch.dtype] = []
    ones = torch.ones

    def addmm(stream: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        seen.append(x.dtype)
        assert out is stream and out.dtype == out_dtype == torch.float32
        return out.add_(x.float() @ weight.float())

    monkeypatch.setattr(torch, "ones", lambda *shape, device, **given: ones(*shape, **given))
    monkeypatch.setattr(torch, "addmm", addmm)
    return seen


def test_a_device_is_asked_once(asked: list[torch.dtype]) -> None:
    assert device_adds.supports_fused_add(GPU, HALF) and device_adds.supports_fused_add(GPU, HALF)
    assert asked == [HALF] * 2
    assert not device_adds.supports_fused_add(GPU, torch.float32)
    assert not device_adds.supports_fused_add(torch.device("cpu"), HALF) and not device_adds.supports_fused_add(
        torch.device("mps"), HALF
    )
    assert asked == [HALF] * 2


@pytest.mark.parametrize("wrong", [RuntimeError("self and mat2 must have the same dtype"), None])
def test_one_that_refuses_or_errs_is_not_believed(
    wrong: Exception | None, asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    def addmm(stream: Tensor, *_: Any, **__: Any) -> Tensor:
        if wrong is not None:
            raise wrong
        return stream.fill_(16)  # β was forgotten

    monkeypatch.setattr(torch, "addmm", addmm)
    assert not device_adds.supports_fused_add(GPU, HALF)


def test_a_single_row_is_tried_as_well(asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bias of half precision it would be read wrongly."""
    adds = torch.addmm

    def addmm(stream: Tensor, *given: Any, **named: Any) -> Tensor:
        return adds(stream, *given, **named) if len(stream) > 1 else stream.fill_(16)

    monkeypatch.setattr(torch, "addmm", addmm)
    assert not device_adds.supports_fused_add(GPU, HALF)


@pytest.mark.parametrize(("bias", "adds"), [(None, True), (torch.ones(5), False)])
@torch.inference_mode()
def test_the_sum_is_the_same_either_way(
    bias: Tensor | None, adds: bool, asked: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_linear, "supports_fused_add", lambda device, dtype: True)
    weight, x, hidden = torch.randn(5, 8), torch.randn(3, 8).to(HALF), torch.randn(3, 5)
    form = DeviceFactory(torch.device("cpu"), HALF).pack(weight, bias)
    expected = hidden + form.multiply(x)
    form.add_to(hidden, x)
    torch.testing.assert_close(hidden, expected, rtol=2**-7, atol=2**-7)
    assert bool(asked) == adds


def test_the_plain_sum_where_a_device_does_not_add() -> None:
    form = DeviceFactory(torch.device("cpu"), HALF).pack(torch.randn(5, 8), None)
    assert not form.fuses_add
