"""Experts of a mixture on a GPU against one expert after the other."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from armature_kernels.linear import experts
from armature_kernels.linear.device import DeviceFactory
from armature_kernels.linear.device_fp8 import DeviceFp8Factory
from armature_kernels.linear.device_int8 import DeviceInt8Factory
from armature_kernels.linear.experts import DeviceExpertStack, ExpertForms, run_experts_torch
from armature_kernels.triton import support
from armature_kernels.triton.experts import ExpertBlocks
from compiled_kernels import CAPABILITIES, MOST_SHARED, compile_all

HIDDEN, INNER = 70, 40
FACTORIES = {"exact": DeviceFactory, "int8": DeviceInt8Factory, "fp8": DeviceFp8Factory, "blocks": DeviceFp8Factory}


def forms_of(
    number: int, has_bias: bool, has_gates: bool, place: torch.device, dtype: torch.dtype, kind: str
) -> ExpertForms:
    generator, factory = torch.Generator().manual_seed(number), FACTORIES[kind](place, dtype)
    first = (2 if has_gates else 1) * INNER

    def form(outputs: int, inputs: int) -> object:
        bias = torch.randn(outputs, generator=generator) if has_bias else None
        weight = torch.randn((outputs, inputs), generator=generator) / inputs**0.5
        if kind != "blocks":
            return factory.pack(weight, bias)
        kept = DeviceFp8Factory(place, dtype, (16, 16)).empty_form(outputs, inputs, bias)
        codes = (weight * 400).to(torch.float8_e4m3fn).view(torch.uint8)
        kept.fill_stored(
            0,
            codes,
            torch.rand(-(-outputs // 16), -(-inputs // 16), generator=generator).repeat_interleave(16, 0)[:outputs]
            / 400,
        )
        return kept

    return ExpertForms(form(first, HIDDEN), form(HIDDEN, INNER), has_gates)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "activation", "has_bias", "has_gates", "dtype", "kind"),
    [
        (7, 5, 2, "silu", True, True, torch.float32, "blocks"),
        (7, 5, 2, "silu", True, True, torch.float32, "int8"),
        (7, 5, 2, "silu", False, True, torch.float32, "exact"),
        (1, 8, 3, "swiglu_oai", True, True, torch.float32, "exact"),
        (90, 2, 1, "relu2", False, False, torch.bfloat16, "exact"),
        (90, 2, 1, "relu2", False, False, torch.bfloat16, "int8"),
        (90, 2, 1, "relu2", False, False, torch.bfloat16, "fp8"),
    ],
)
@torch.inference_mode()
def test_rows_get_the_sum_of_their_experts(
    rows: int, num_experts: int, top_k: int, activation: str, has_bias: bool, has_gates: bool, dtype: torch.dtype, kind: str,
    served_by_triton: None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(experts, "triton_usable", lambda tensor: True)
    forms = [forms_of(number, has_bias, has_gates, gpu, dtype, kind) for number in range(num_experts)]
    generator = torch.Generator().manual_seed(rows)
    x, hidden = (torch.randn((rows, HIDDEN), generator=generator).to(gpu) for _ in range(2))
    scores = torch.rand((rows, num_experts), generator=generator)
    scores[:, 1] -= 1.0  # few rows use this one
    weights, ids = (one.to(gpu) for one in scores.topk(top_k))
    expected = hidden.clone()
    run_experts_torch(forms, expected, x.to(dtype), ids, weights, activation)
    stack = DeviceExpertStack.of(forms)
    assert stack is not None
    name = "weight" if kind == "exact" else "codes"
    assert all(getattr(form.gate_up, name).data_ptr() >= stack.gate_up.weights.data_ptr() for form in forms)
    stack.add_to(hidden, x.to(dtype), ids, weights, activation)
    if dtype == torch.float32:
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    else:  # squares double the error of single elements
        assert (hidden - expected).norm() <= 2**-7 * expected.norm()


@torch.inference_mode()
def test_experts_are_computed_one_by_one_where_the_kernel_is_wrong(
    served_by_triton: None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts, "triton_usable", lambda tensor: True)
    monkeypatch.setattr(support, "_agreed", {})
    right = ExpertBlocks.multiply
    monkeypatch.setattr(ExpertBlocks, "multiply", lambda *asked, is_sorted: right(*asked, is_sorted).flip(0))
    forms = [forms_of(number, False, True, gpu, torch.float32, "exact") for number in range(3)]
    x, hidden = torch.randn(5, HIDDEN, device=gpu), torch.zeros(5, HIDDEN, device=gpu)
    weights, ids = torch.rand(5, 3, device=gpu).topk(2)
    expected = hidden.clone()
    run_experts_torch(forms, expected, x, ids, weights, "silu")
    stack = DeviceExpertStack.of(forms)
    assert stack is not None
    stack.add_to(hidden, x, ids, weights, "silu")
    assert torch.equal(hidden, expected) and "The kernel of experts differs" in caplog.text


def test_blocks_hold_rows_of_one_expert_each() -> None:
    ids = torch.tensor([[0, 2], [2, 0], [2, 3]] * 9)
    blocks = ExpertBlocks.of(ids, 5)
    assert blocks.rows == 16 and len(blocks.experts) == 4 + 5
    found = [(expert, first) for expert, first in zip(blocks.experts.tolist(), blocks.firsts.tolist(), strict=True)]
    assert [one for one in found if one[0] >= 0] == [(0, 0), (0, 16), (2, 18), (2, 34), (3, 45)]
    assert blocks.ends.tolist() == [18, 18, 45, 54, 54]


def test_quantized_experts_have_no_stack() -> None:
    assert DeviceExpertStack.of([ExpertForms(object(), object())]) is None  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_and_keeps_within_registers(capability: int) -> None:
    found = compile_all("launches_experts", capability, ptx=True)
    assert {"griddepcontrol.wait" in one.ptx for one in found} == {capability >= 90}
    assert {one.kernel for one in found} == {"_multiply"} and not any(one.stack for one in found)
    assert max(one.shared for one in found) <= min(MOST_SHARED.values())
