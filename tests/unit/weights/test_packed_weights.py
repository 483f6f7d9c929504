"""Checkpoints that other libraries quantized: values are those of independent packing code, and codes are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointInvalid
from app.kernels.linear.int_panels import IntPanelLinear
from app.kernels.linear.linear import Linear
from app.kernels.native.arguments import OpCode
from app.kernels.native.operations import has_kernel
from app.weights.checkpoint import open_checkpoint
from app.weights.quantized.values import unpack
from app.weights.tensor_reader import MappedFiles
from loaded_models import load
from tiny_checkpoints import write_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
GROUP = 32
NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])  # fmt: skip
NAME = "model.layers.1.mlp.down_proj.weight"


def packed(codes: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [n, m] in words of 32 bits along the last axis, one word at a time."""
    each = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // each), dtype=np.uint64)
    for place, source in enumerate(order or range(each)):
        words |= codes[:, source::each].astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def drawn(shape: Any, high: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(0, high, tuple(shape))


def float_parts(method: str, shape: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight whose codes are not integers, and its values."""
    outputs, inputs = shape
    codes = drawn((outputs, inputs), 16)
    if method == "fp8":
        own8 = torch.from_numpy(drawn((outputs, inputs), 16) / 8 - 1).to(torch.float8_e4m3fn)
        grid = torch.rand(-(-outputs // 48), -(-inputs // 48), generator=torch.Generator().manual_seed(1)) + 0.5
        values = own8.float() * grid.repeat_interleave(48, 0)[:outputs].repeat_interleave(48, 1)[:, :inputs]
        tensors = {"weight": own8, "weight_scale_inv": grid}
    else:
        flat, largest = codes.flatten(), torch.rand(outputs * inputs // 64) + 0.1
        values = (NF4[torch.from_numpy(flat)] * largest.repeat_interleave(64)).view(outputs, inputs)
        state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)})
        tensors = {
            "weight": torch.from_numpy((flat[::2] << 4 | flat[1::2]).astype(np.uint8))[:, None],
            "weight.absmax": largest,
            "weight.quant_map": NF4.clone(),
            "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state.encode()), dtype=torch.uint8),
        }
    return tensors, values


def parts_of(method: str, stem: str, shape: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight of this shape, and its values."""
    outputs, inputs = shape
    groups = inputs // GROUP
    codes, zeros = drawn((outputs, inputs), 16), drawn((outputs, groups), 15) + 1
    # Powers of two and their neighbours: BF16 and FP16 hold them.
    scales = torch.from_numpy(np.exp2(-6.0) * (1 + drawn((outputs, groups), 16) / 16)).float()
    spread = scales.repeat_interleave(GROUP, 1)
    wide_zeros = torch.from_numpy(zeros).repeat_interleave(GROUP, 1)
    values = spread * (torch.from_numpy(codes) - wide_zeros)
    if method in ("gptq", "gptq_v2"):
        stored = zeros.T - (method == "gptq")
        order = torch.arange(inputs, dtype=torch.int32) // GROUP
        tensors = {
            "qweight": packed(codes, 4).T,
            "qzeros": packed(stored, 4),
            "scales": scales.T.half(),
            "g_idx": order,
        }
        tensors["qweight"] = packed(codes, 4).T
    elif method == "awq":
        order_awq = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": packed(codes.T, 4, order_awq),
            "qzeros": packed(zeros.T, 4, order_awq),
            "scales": scales.T.half(),
        }
    elif method == "w4a16":
        values = spread * (torch.from_numpy(codes) - 8)
        tensors = {
            "weight_packed": packed(codes, 4),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(shape),
        }
    elif method == "w4a16_asymmetric":
        columns = packed(zeros.T, 4).T
        tensors = {"weight_packed": packed(codes, 4), "weight_scale": scales.bfloat16(), "weight_zero_point": columns}
    elif method == "w8a8":
        own = torch.from_numpy(drawn((outputs, inputs), 256) - 128).to(torch.int8)
        values = own.float() * scales[:, :1]
        tensors = {"weight": own, "weight_scale": scales[:, :1].bfloat16()}
    elif method == "mlx":
        values = spread * torch.from_numpy(codes) + -0.125
        tensors = {
            "weight": packed(codes, 4).view(torch.uint32),
            "scales": scales,
            "biases": torch.full_like(scales, -0.125),
        }
    else:
        tensors, values = float_parts(method, shape)
    return {f"{stem}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, values.float()


def compressed(stored_as: str, bits: int, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": groups, "ignore": ["lm_head"]}


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "w4a16": compressed("pack-quantized", 4, strategy="group", group_size=GROUP),
    "w4a16_asymmetric": compressed("pack-quantized", 4, strategy="group", group_size=GROUP, symmetric=False),
    "w8a8": compressed("int-quantized", 8, strategy="channel"),
    "fp8": {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mlx": {"bits": 4, "group_size": GROUP},
}
KEPT = {
    "gptq": "int4",
    "gptq_v2": "int4",
    "awq": "int4",
    "w4a16": "int4",
    "w4a16_asymmetric": "int4",
    "w8a8": "int8",
    "mlx": "int4",
}


def quantized(folder: Path, method: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose layers are quantized, and the values of all its tensors."""
    directory = write_checkpoint(folder / "quantized", **SIZES)
    exact = load_file(directory / "model.safetensors")
    stored, values = {}, {}
    for name, tensor in exact.items():
        if tensor.dim() == 2 and ".layers." in name:
            parts, values[name] = parts_of(method, name.removesuffix(".weight"), tensor.shape)
            stored |= parts
        else:
            stored[name] = values[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization" if method == "mlx" else "quantization_config"] = CONFIGS[method]
    (directory / "config.json").write_text(json.dumps(config))
    return directory, values


@pytest.mark.parametrize("method", CONFIGS)
def test_values_are_those_that_were_packed(tmp_path: Path, method: str) -> None:
    directory, values = quantized(tmp_path, method)
    checkpoint, files = open_checkpoint(directory), MappedFiles()
    assert checkpoint.needs().codes_precision == KEPT.get(method, "") and checkpoint.needs().stored_quantization
    for name, expected in values.items():
        torch.testing.assert_close(files.tensor(checkpoint.tensors[name]), expected, rtol=3e-7, atol=1e-9, msg=name)
    part = torch.empty(19, values[NAME].shape[1])
    files.read(checkpoint.tensors[NAME], 5, part)
    torch.testing.assert_close(part, values[NAME][5:24], rtol=3e-7, atol=1e-9)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("method", KEPT)
def test_codes_are_kept(tmp_path: Path, method: str) -> None:
    directory, values = quantized(tmp_path, method)
    for module in load(directory, KEPT[method]).modules():
        if isinstance(module, Linear) and module.sources != ("lm_head",):
            expected = torch.cat([values[f"{source}.weight"] for source in module.sources])
            assert isinstance(module.form, IntPanelLinear)
            # These scales are BF16 numbers; a minimum is rounded to BF16, by at most 1 in 512.
            error = (module.form.dequantised() - expected).abs().max() / expected.abs().max()
            assert error < (1e-6 if method in ("w4a16", "w8a8", "mlx") else 1 / 256)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_of_any_bits_are_unpacked(bits: int) -> None:
    codes = drawn((3, 64), 2**bits)
    streams = ["".join(f"{code:0{bits}b}"[::-1] for code in row) for row in codes]
    words = [[int(stream[at : at + 32][::-1], 2) for at in range(0, len(stream), 32)] for stream in streams]
    stored = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    assert np.array_equal(unpack(stored, bits).numpy(), codes)


def test_an_unknown_method_and_unnamed_quantization_are_refused(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "w8a8")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointInvalid, match=r"already quantized by aqlm .* Supported are gptq, awq"):
        open_checkpoint(directory)
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointInvalid, match=r"weights are quantized \(model.layers.0.*weight_scale.*does not say how"
    ):
        open_checkpoint(directory)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "gptq")
    stored = load_file(directory / "model.safetensors")
    del stored[NAME.replace("weight", "scales")]
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"down_proj\.scales is missing"):
        open_checkpoint(directory)
