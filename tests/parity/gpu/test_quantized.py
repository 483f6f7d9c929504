"""Dequantization and the products of int8 and E4M3 by Triton against references, and on a GPU torch's int4 product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.linear import device_fp8, device_int4, device_int8
from armature_kernels.linear.device_fp8 import DeviceFp8Factory, multiplies_blocks, multiplies_fp8, quantize_fp8
from armature_kernels.linear.device_int4 import DeviceInt4Factory, dequantize_torch
from armature_kernels.linear.device_int8 import DeviceInt8Factory
from armature_kernels.linear.layout import BLOCKS_CAPABILITY, MIN_FP8_CAPABILITY
from armature_kernels.triton import linear, support
from armature_kernels.triton.elementwise import dequantize
from armature_kernels.triton.linear import quantize_rows
from compiled_kernels import CAPABILITIES, compile_all
from tiled_codes import TiledCodes, fresh_scratch


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (72, 192), (136, 640)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_what_is_written_out_is_what_the_codes_mean(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(device_int4, "shared_scratch", fresh_scratch())
    if gpu.type == "cpu":
        monkeypatch.setattr(device_int4, "pack_code_pairs", TiledCodes().pack)
    form = DeviceInt4Factory(gpu, dtype).pack(torch.randn(outputs, inputs), None)
    order, out, twin = (
        form.scratch.order(inputs),
        *(torch.full((outputs, inputs), torch.nan, dtype=dtype, device=gpu) for _ in "ab"),
    )
    dequantize(form.packed, order, form.scales, out)
    dequantize_torch(form.packed, order, form.scales, twin)
    torch.testing.assert_close(
        out, twin, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=2**-8 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 24, 200, torch.bfloat16),
        (17, 16, 128, torch.float32),
        (70, 40, 64, torch.bfloat16),
        (128, 16384, 16, torch.float16),
    ],
)
@torch.inference_mode()
def test_rows_times_int8_codes_are_the_dequantized_product(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(device_int8, "triton_usable", lambda tensor: True)
    monkeypatch.setattr(device_int8, "shared_scratch", fresh_scratch())
    generator = torch.Generator().manual_seed(rows)
    weight, x, bias = (
        torch.randn(size, generator=generator) for size in ((outputs, inputs), (rows, inputs), (outputs,))
    )
    form = DeviceInt8Factory(gpu, dtype).pack(weight, bias.to(dtype))
    x = x.to(gpu, dtype)
    exact = F.linear(x.float(), form.codes.float() * form.scales.float()[:, None], bias.to(gpu, dtype).float())
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(form.multiply(x).float(), exact, rtol=close, atol=close * inputs**0.5)
    form.max_code_rows = 0
    torch.testing.assert_close(form.multiply(x).float(), exact, rtol=2 * close, atol=2 * close * inputs**0.5)


@pytest.mark.parametrize(
    ("rows", "shape", "block", "dtype"),
    [
        (17, (40, 104), (48, 48), torch.bfloat16),
        (1, (24, 200), (1, 200), torch.float32),
        (70, (256, 384), (128, 128), torch.float16),
        (3, (40, 64), (40, 64), torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_rows_times_e4m3_codes_are_the_dequantized_product(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:  # fmt: skip
    """With every code, subnormal ones too."""
    for module in (device_int8, device_fp8):
        monkeypatch.setattr(module, "triton_usable", lambda tensor: True)
    monkeypatch.setattr(device_fp8, "shared_scratch", fresh_scratch())
    generator, (outputs, inputs) = torch.Generator().manual_seed(rows), shape
    known = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    codes = known[torch.randint(len(known), shape, generator=generator)]
    scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), generator=generator) / 256
    spread = scales.repeat_interleave(block[0], 0)[:outputs]
    form = DeviceFp8Factory(gpu, dtype, block).empty_form(outputs, inputs, torch.randn(outputs, generator=generator))
    form.fill_stored(0, codes[:16], spread[:16])
    form.fill_stored(16, codes[16:], spread[16:])
    assert (
        torch.equal(form.scales.cpu(), scales)
        and form.nbytes == outputs * inputs + 4 * scales.numel() + form.bias.nbytes
    )  # type: ignore[union-attr]
    weight = codes.view(torch.float8_e4m3fn).float() * spread.repeat_interleave(block[1], 1)[:, :inputs]
    rounding = 2**-7 if dtype == torch.bfloat16 else 0  # the interpreter truncates to BF16
    torch.testing.assert_close(form.dequantized().cpu(), weight.to(dtype), rtol=rounding, atol=0)
    x = torch.randn(rows, inputs, generator=generator).to(gpu, dtype)
    exact = F.linear(x.float(), weight.to(gpu), form.bias.float())  # type: ignore[union-attr]
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(form.multiply(x).float(), exact, rtol=close, atol=close * inputs**0.5)
    form.max_code_rows = 0
    torch.testing.assert_close(form.multiply(x).float(), exact, rtol=2 * close, atol=2 * close * inputs**0.5)


@pytest.mark.parametrize("kind", [DeviceInt8Factory, DeviceFp8Factory])
@torch.inference_mode()
def test_codes_are_multiplied_by_torch_where_the_kernel_is_wrong(
    gpu: torch.device, kind: type[DeviceInt8Factory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (device_int8, device_fp8):
        monkeypatch.setattr(module, "triton_usable", lambda tensor: True)
        monkeypatch.setattr(module, "shared_scratch", fresh_scratch())
    monkeypatch.setattr(support, "_agreed", {})
    right = linear.multiply_codes
    monkeypatch.setattr(linear, "multiply_codes", lambda *asked: right(*asked) * 1.1)
    form, x = kind(gpu, torch.float32).pack(torch.randn(24, 48), None), torch.randn(2, 48, device=gpu)
    form.few_rows = 0
    found = form.multiply(x)
    assert torch.equal(found, F.linear(x, form.dequantized_torch()))
    assert caplog.text.count("The kernel of products with codes differs from its reference by 0.1") >= 1


@torch.inference_mode()
def test_rows_are_quantized_to_e4m3_as_torch_does(gpu: torch.device) -> None:
    """Rows of any size, and every value between two codes; a NaN or an infinity makes its row NaN."""
    x = torch.randn(9, 1100, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 3, 9)[:, None]
    ordered = torch.arange(1100)
    x[4], x[7], x[8], x[8, -1] = 0, (ordered / 2).clamp(max=448), -ordered / 1024, 448
    (codes, scales), (known, own) = quantize_rows(x.to(gpu)), quantize_fp8(x.to(gpu))
    assert torch.equal(codes.float(), known.float()) and torch.equal(scales, own)
    grouped, (codes, scales) = x[:, :1024].contiguous().to(gpu), quantize_fp8(x[:, :1024].to(gpu), 128)
    found, own = quantize_rows(grouped, 128, padding=3)
    assert found.shape == (12, 1024) and own.stride() == (1, 12)
    assert torch.equal(found[:9].float(), codes.float()) and torch.equal(own[:9], scales)
    x[5, 7], x[6, 1050] = torch.nan, -torch.inf
    assert quantize_rows(x.to(gpu))[1].isnan().flatten().tolist() == [row in (5, 6) for row in range(9)]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_and_keeps_within_registers(capability: int) -> None:
    found = compile_all("launches_quantized", capability)
    known = {"_dequantize", "_dequantize_codes", "_multiply_codes", "_quantize_rows"}
    assert {one.kernel for one in found} == known and not any(one.stack for one in found)


@pytest.mark.cuda
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (72, 192), (4096, 4096), (256, 14336)])
@torch.inference_mode()
def test_torchs_product_and_what_is_written_out_agree_on_a_gpu(gpu: torch.device, outputs: int, inputs: int) -> None:
    """Whatever torch's order is: it was learnt. Both roads are held against the codes' meaning in FP32 too."""
    weight, x = torch.randn(outputs, inputs, device=gpu), torch.randn(64, inputs, device=gpu).bfloat16()
    bias = torch.randn(outputs).bfloat16()
    form = DeviceInt4Factory(gpu, torch.bfloat16).pack(weight, bias)
    exact = F.linear(x.float(), form.dequantized().float(), bias.to(gpu).float())
    allowed = {"rtol": 2**-6, "atol": 0.02 * inputs**0.5}
    for rows in (1, 7, 16, 17, 64):
        torch.testing.assert_close(form.multiply(x[:rows]).float(), exact[:rows], **allowed)
    form.max_code_rows = 0
    torch.testing.assert_close(form.multiply(x).float(), exact, **allowed)
    assert (form.dequantized().float() - weight).norm() < 0.12 * weight.norm()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [(4096, 4096, None), (6144, 4096, (1024, 4096)), (48, 80, None), (6144, 4096, (128, 128))],
)
@torch.inference_mode()
def test_many_rows_are_multiplied_in_e4m3_on_a_gpu(
    gpu: torch.device, outputs: int, inputs: int, block: tuple[int, int] | None
) -> None:
    if torch.cuda.get_device_capability() < MIN_FP8_CAPABILITY:
        pytest.skip("this GPU has no products of E4M3")
    if block == (128, 128) and torch.cuda.get_device_capability() != BLOCKS_CAPABILITY:
        pytest.skip("this GPU has no products of blocks")
    assert (multiplies_blocks if block == (128, 128) else multiplies_fp8)(gpu, torch.bfloat16)
    weight, x = torch.randn(outputs, inputs, device=gpu), torch.randn(300, inputs, device=gpu).bfloat16()
    form = DeviceFp8Factory(gpu, torch.bfloat16, block).empty_form(outputs, inputs, torch.randn(outputs).bfloat16())
    if block is None:
        form.fill(0, weight)
    else:
        form.fill_stored(
            0,
            (weight * 50).to(torch.float8_e4m3fn).view(torch.uint8),
            torch.rand(outputs // block[0], inputs // block[1], device=gpu).repeat_interleave(block[0], 0),
        )
    group = 128 if block == (128, 128) else inputs
    codes, scales = quantize_fp8(x, group)
    exact = F.linear(codes.float() * scales.repeat_interleave(group, 1), form.dequantized().float(), form.bias.float())  # type: ignore[union-attr]
    torch.testing.assert_close(form.multiply(x).float(), exact, rtol=2**-6, atol=float(exact.std()) * 2**-6)
