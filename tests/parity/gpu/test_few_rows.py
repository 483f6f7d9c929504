"""Products of few rows by Triton, with the norm before and what follows in one kernel, against torch in FP32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.linear import device_int4
from armature_kernels.linear.device import CodesAndScales
from armature_kernels.linear.device_fp8 import quantize_fp8
from armature_kernels.linear.device_int4 import DeviceInt4Factory, dequantize_torch
from armature_kernels.linear.layout import DEVICE_GROUP
from armature_kernels.linear.quantization import quantize_int8
from armature_kernels.triton.linear import multiply_few
from compiled_kernels import CAPABILITIES, compile_all
from tiled_codes import TiledCodes, fresh_scratch

Made = Callable[[Tensor, torch.device], tuple[CodesAndScales, Tensor]]  # a weight as it is held, and what it means


def _plain(dtype: torch.dtype) -> Made:
    def make(weight: Tensor, gpu: torch.device) -> tuple[CodesAndScales, Tensor]:
        held = weight.to(gpu, dtype)
        return (held, None, (1, 1)), held.float()

    return make


def _int8(weight: Tensor, gpu: torch.device) -> tuple[CodesAndScales, Tensor]:
    found = quantize_int8(weight)
    codes, scales = found.codes.to(gpu), found.scales.squeeze(1).to(gpu, torch.bfloat16)
    return (codes, scales, (1, weight.shape[1])), codes.float() * scales.float()[:, None]


def _fp8(weight: Tensor, gpu: torch.device) -> tuple[CodesAndScales, Tensor]:
    codes, scales = (one.to(gpu) for one in quantize_fp8(weight))
    return (codes, scales, (1, weight.shape[1])), codes.float() * scales


def _fp8_in_blocks(weight: Tensor, gpu: torch.device) -> tuple[CodesAndScales, Tensor]:
    codes = (weight * 50).to(gpu, torch.float8_e4m3fn)
    height, width = 16, 32
    scales = torch.rand(-(-len(weight) // height), -(-weight.shape[1] // width), device=gpu)
    spread = scales.repeat_interleave(height, 0)[: len(weight)].repeat_interleave(width, 1)[:, : weight.shape[1]]
    return (codes, scales, (height, width)), codes.float() * spread


def _int4(weight: Tensor, gpu: torch.device) -> tuple[CodesAndScales, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_int4, "shared_scratch", fresh_scratch())
        if gpu.type == "cpu":
            patch.setattr(device_int4, "pack_code_pairs", TiledCodes().pack)
        form = DeviceInt4Factory(gpu, torch.bfloat16).pack(weight, None)
        exact = torch.empty(weight.shape, device=gpu)
        dequantize_torch(form.packed, form.scratch.order(weight.shape[1]), form.scales.float(), exact)
    return (form.packed, form.scales, (1, DEVICE_GROUP)), exact


@pytest.mark.parametrize(
    ("make", "rows", "outputs", "inputs", "gates", "adds", "normed", "has_bias"),
    [
        (_plain(torch.bfloat16), 2, 48, 640, True, False, True, False),
        (_plain(torch.float16), 3, 41, 516, False, True, False, True),
        (_plain(torch.bfloat16), 1, 8, 2056, False, False, True, True),
        (_int8, 4, 34, 200, True, False, True, True),
        (_int8, 1, 5, 1028, False, True, False, False),
        (_fp8, 2, 24, 104, False, False, True, False),
        (_fp8_in_blocks, 3, 56, 1120, True, False, True, False),
        (_fp8_in_blocks, 1, 40, 96, False, True, False, True),
        (_int4, 2, 32, 640, True, False, True, True),
        (_int4, 4, 24, 192, False, True, False, False),
        (_int4, 1, 72, 2176, False, False, True, True),
    ],
)
@torch.inference_mode()
def test_few_rows_are_the_norm_the_product_and_what_follows(
    gpu: torch.device, make: Made, rows: int, outputs: int, inputs: int, gates: bool, adds: bool, normed: bool, has_bias: bool
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(rows * outputs)
    weight, x, norm, bias, before = (
        torch.randn(size, generator=generator)
        for size in ((outputs, inputs), (rows, inputs + 3), (inputs,), (outputs,), (rows + 1, outputs + 5))
    )
    held, exact = make(weight, gpu)
    x = x.to(gpu, torch.float32 if normed else torch.bfloat16)[:, :inputs]
    norm, bias = norm.to(gpu), bias.to(gpu, torch.bfloat16)
    wide = x.float()
    wide = F.rms_norm(wide, (inputs,), norm, 1e-5) if normed else wide
    expected = F.linear(wide, exact, bias.float() if has_bias else None)
    if gates:
        first, second = expected.chunk(2, -1)
        expected = F.silu(first) * second
    before = before.to(gpu)
    memory = before.clone()
    out = memory[:rows, : expected.shape[1]]
    expected = out + expected if adds else expected
    given = multiply_few(
        x, held, out, (norm, 1e-5) if normed else None, bias if has_bias else None, "silu" if gates else "", adds
    )
    assert given is out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    memory[:rows, : expected.shape[1]] = before[:rows, : expected.shape[1]]
    assert torch.equal(memory, before), "nothing else is written"


@torch.inference_mode()
def test_a_number_that_is_not_finite_reaches_its_row_alone(gpu: torch.device) -> None:
    held, _ = _plain(torch.bfloat16)(torch.ones(16, 64), gpu)
    x = torch.ones(2, 64, device=gpu)
    x[1, 5] = torch.nan
    out = multiply_few(x, held, torch.zeros(2, 16, device=gpu), (torch.ones(64, device=gpu), 1e-6))
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_few_rows_compile_and_keep_within_registers(capability: int) -> None:
    found = compile_all("launches_few_rows", capability, ptx=True)
    assert {one.kernel for one in found} == {"_multiply_few"} and not any(one.stack for one in found)
    # Threads exchange nothing before their last sums, so none waits for another.
    for one in found:
        loop = one.ptx.partition("Inner Loop Header")[2].partition("bra")[0]
        assert loop and "bar.sync" not in loop, one.launch
        assert ("griddepcontrol.wait" in one.ptx) == (capability >= 90)
