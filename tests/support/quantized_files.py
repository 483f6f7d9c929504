"""Checkpoints in the formats of other libraries, packed bit by bit as the formats are defined, and the values that they hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_checkpoints import write_checkpoint

Codes = np.ndarray[Any, Any]
Packed = tuple[dict[str, Tensor], Tensor]  # the stored tensors by the end of their names, and the values
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0, 1 / 16, 8, 12, 4, 6, 2, 3))


def packed(codes: Codes, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Codes [n, m] as a stream of bits in words [n, m * bits / 32], lowest bits first; `order`: of the codes in a word."""
    if order is not None:
        codes = codes.reshape(len(codes), -1, len(order))[..., list(order)].reshape(len(codes), -1)
    stream = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    words = stream.reshape(len(codes), -1, 32) << np.arange(32, dtype=np.uint64)
    return torch.from_numpy(words.sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32))


def drawn(shape: Sequence[int], high: int, low: int = 0) -> Codes:
    return np.random.default_rng(sum(shape)).integers(low, high, tuple(shape))


def drawn_scales(shape: tuple[int, int], bits: int) -> Tensor:
    """Scales with which values of these bits are near 1 / 8. FP16 and BF16 hold them, and their products with four bits."""
    return torch.from_numpy(np.exp2(-2.0 - bits) * (1 + drawn(shape, 8) / 8)).float()


def spread(each: Tensor, inputs: int) -> Tensor:
    """The number of each input's group, [outputs, inputs], from [outputs, groups]."""
    return each.repeat_interleave(inputs // each.shape[1], 1)


def gptq_tensors(codes: Codes, zeros: Codes, scales: Tensor, bits: int, order: Tensor, less: int = 1) -> Packed:
    """A weight in GPTQ's format: codes [outputs, inputs], zeros and scales [outputs, groups], the group of each input.

    As GPTQModel does, `less` is subtracted from whole words, so a zero of 0 borrows from the next; in 3 bits it wraps.
    """
    if bits == 3:
        stored = packed(zeros.T - less, bits)
    else:
        stored = packed(zeros.T, bits) - less * ((2**32 - 1) // (2**bits - 1))
    tensors = {
        "qweight": packed(codes, bits).T,
        "qzeros": stored,
        "scales": scales.T.half(),
        "g_idx": order.int(),
    }
    return tensors, scales[:, order] * (torch.from_numpy(codes) - torch.from_numpy(zeros)[:, order])


def round_to_gptq(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Round a weight to the nearest of 16 values for each group, and return it in GPTQ's format."""
    grouped = weight.float().view(weight.shape[0], -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-7).half().float()
    zeros = (-low / scales).round().clamp(1, 15)  # the format stores them less 1
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    order = torch.arange(weight.shape[1]) // group
    return gptq_tensors(codes.long().numpy(), zeros.long().numpy(), scales, 4, order)[0]


def gptq(shape: tuple[int, int], bits: int = 4, *, sym: bool = False, less: int = 1, shuffled: bool = False) -> Packed:
    outputs, inputs = shape
    groups = (outputs, inputs // GROUP)
    zeros = np.full(groups, 2 ** (bits - 1)) if sym else drawn(groups, 2**bits)
    order = torch.arange(inputs) // GROUP
    if shuffled:
        order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    return gptq_tensors(drawn(shape, 2**bits), zeros, drawn_scales(groups, bits), bits, order, less)


def awq(shape: tuple[int, int]) -> Packed:
    groups = (shape[0], shape[1] // GROUP)
    codes, zeros, scales = drawn(shape, 16), drawn(groups, 16), drawn_scales(groups, 4)
    tensors = {
        "qweight": packed(codes.T, 4, AWQ_ORDER),
        "qzeros": packed(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.half(),
    }
    values = spread(scales, shape[1]) * (torch.from_numpy(codes) - spread(torch.from_numpy(zeros), shape[1]))
    return tensors, values


def pack_quantized(shape: tuple[int, int], bits: int = 4, *, symmetric: bool = True) -> Packed:
    groups, middle = (shape[0], shape[1] // GROUP), 2 ** (bits - 1)
    codes, scales = drawn(shape, 2**bits), drawn_scales(groups, bits)
    zeros = np.full(groups, middle) if symmetric else drawn(groups, 2**bits)
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T, bits).T
    values = spread(scales, shape[1]) * (torch.from_numpy(codes) - spread(torch.from_numpy(zeros), shape[1]))
    return tensors, values


def mxfp4_packed(shape: tuple[int, int]) -> Packed:
    codes, exponents = drawn(shape, 16), drawn((shape[0], shape[1] // 32), 123, low=119)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scales = torch.exp2(torch.from_numpy(exponents).float() - 127).repeat_interleave(32, 1)
    values = torch.cat((sizes, -sizes))[torch.from_numpy(codes)] * scales
    pairs = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    return {"weight_packed": pairs, "weight_scale": torch.from_numpy(exponents).to(torch.uint8)}, values


def int_quantized(shape: tuple[int, int]) -> Packed:
    codes, scales = torch.from_numpy(drawn(shape, 128, low=-128)).to(torch.int8), drawn_scales((shape[0], 1), 8)
    return {"weight": codes, "weight_scale": scales.bfloat16()}, codes.float() * scales


def float_quantized(shape: tuple[int, int], block: tuple[int, int] | None = None) -> Packed:
    """In 8-bit floats: a scale for each block of outputs and inputs, or for each output."""
    codes = torch.from_numpy(drawn(shape, 16) / 8 - 1).to(torch.float8_e4m3fn)
    height, width = block or (1, shape[1])
    scales = drawn_scales((-(-shape[0] // height), -(-shape[1] // width)), 1)
    values = codes.float() * scales.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]
    return {"weight": codes, "weight_scale" if block is None else "weight_scale_inv": scales}, values


def bitsandbytes4(shape: tuple[int, int], table: str = "nf4", *, nested: bool = False) -> Packed:
    levels = torch.tensor(NF4 if table == "nf4" else FP4)
    codes, blocks = drawn(shape, 16).flatten(), shape[0] * shape[1] // 64
    largest, state = torch.from_numpy(drawn((blocks,), 32, low=8) / 128).float(), {"shape": list(shape)}
    tensors = {"weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None]}
    if nested:
        own, offset = torch.from_numpy(drawn((blocks,), 256)).byte(), 0.3
        table8, scales = torch.linspace(-1, 1, 256), drawn_scales((1, -(-blocks // 16)), 1)[0]
        largest = table8[own.long()] * scales.repeat_interleave(16)[:blocks] + offset
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": own, "weight.nested_absmax": scales, "weight.nested_quant_map": table8}
    else:
        tensors["weight.absmax"] = largest
    text = json.dumps({"quant_type": table, "blocksize": 64, "dtype": "bfloat16", **state}).encode()
    tensors["weight.quant_map"] = levels.clone()
    tensors[f"weight.quant_state.bitsandbytes__{table}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors, (levels[torch.from_numpy(codes)] * largest.repeat_interleave(64)).view(shape)


def bitsandbytes8(shape: tuple[int, int]) -> Packed:
    codes = torch.from_numpy(drawn(shape, 128, low=-127)).to(torch.int8)
    largest = torch.from_numpy(drawn((shape[0],), 64, low=16) / 256).float()
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * largest[:, None] / 127


def mlx(shape: tuple[int, int], bits: int = 4) -> Packed:
    groups = (shape[0], shape[1] // GROUP)
    codes, scales = drawn(shape, 2**bits), drawn_scales(groups, bits)
    minimums = -scales * 2.0 ** (bits - 1)
    tensors = {"weight": packed(codes, bits).view(torch.uint32), "scales": scales, "biases": minimums}
    return tensors, spread(scales, shape[1]) * torch.from_numpy(codes) + spread(minimums, shape[1])


def compressed(stored_as: str, bits: int, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": groups, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Format:
    """A format: what packs a weight, its configuration, and the precision that keeps its codes, empty if none does."""

    pack: Callable[..., Packed]
    config: Mapping[str, Any]
    kept: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: float = 1e-6  # of values that keep their codes, relative to the largest


def _gptq(bits: int = 4, kept: str = "", *, sym: bool = False, shuffled: bool = False, second: bool = False) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": sym, "desc_act": shuffled}
    config |= {"checkpoint_format": "gptq_v2"} if second else {}
    options = {"bits": bits, "sym": sym, "shuffled": shuffled, "less": 0 if second else 1}
    return Format(gptq, config, kept, options)


_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_BY_GROUP = {"strategy": "group", "group_size": GROUP}
FORMATS: dict[str, Format] = {
    "gptq": _gptq(kept="int4"),
    "gptq symmetric": _gptq(kept="int4", sym=True),
    "gptq in the order of activations": _gptq(shuffled=True),
    "gptq_v2": _gptq(kept="int4", second=True),
    "gptq in 2 bits": _gptq(2, "int4"),
    "gptq in 3 bits": _gptq(3, "int4"),
    "gptq in 8 bits": _gptq(8),
    "gptq in 8 bits symmetric": _gptq(8, "int8", sym=True),
    "awq": Format(
        awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, "int4"
    ),
    "w4a16": Format(pack_quantized, compressed("pack-quantized", 4, **_BY_GROUP), "int4"),
    "w4a16 asymmetric": Format(
        pack_quantized, compressed("pack-quantized", 4, **_BY_GROUP, symmetric=False), "int4", {"symmetric": False}
    ),
    "w8a16": Format(pack_quantized, compressed("pack-quantized", 8, **_BY_GROUP), "int8", {"bits": 8}),
    "w8a8": Format(int_quantized, compressed("int-quantized", 8, strategy="channel"), "int8"),
    "float-quantized": Format(float_quantized, compressed("float-quantized", 8, type="float", strategy="channel")),
    "mxfp4": Format(
        mxfp4_packed,
        compressed("mxfp4-pack-quantized", 4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"),
        "int8",
    ),
    "fp8 in blocks": Format(
        float_quantized, {"quant_method": "fp8", "weight_block_size": [48, 48]}, options={"block": (48, 48)}
    ),
    "fp8 in blocks of 128": Format(
        float_quantized, {"quant_method": "fp8", "weight_block_size": [128, 128]}, options={"block": (128, 128)}
    ),
    "nf4": Format(bitsandbytes4, {**_BITSANDBYTES, "bnb_4bit_quant_type": "nf4"}),
    "nf4 nested": Format(
        bitsandbytes4, {**_BITSANDBYTES, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, options={"nested": True}
    ),
    "fp4": Format(bitsandbytes4, {**_BITSANDBYTES, "bnb_4bit_quant_type": "fp4"}, options={"table": "fp4"}),
    # Scales are no BF16 numbers.
    "bitsandbytes int8": Format(
        bitsandbytes8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", apart=1 / 512
    ),
    "mlx": Format(mlx, {"bits": 4, "group_size": GROUP}, "int4"),
    # No form has eight bits and minimums, so codes are rounded again.
    "mlx in 8 bits": Format(mlx, {"bits": 8, "group_size": GROUP}, "int8", {"bits": 8}, apart=1 / 200),
}  # fmt: skip


def quantized(folder: Path, name: str, **overrides: Any) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint whose layers are in this format, and the values of all its tensors."""
    kind, directory = FORMATS[name], write_checkpoint(folder / "quantized", **{**SIZES, **overrides})
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for tensor_name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in tensor_name:
            parts, decoded = kind.pack((tensor.shape[0], tensor.shape[1]), **kind.options)
            stem, values[tensor_name] = tensor_name.removesuffix(".weight"), decoded.float()
            stored |= {f"{stem}.{part}": one.contiguous() for part, one in parts.items()}
        else:
            stored[tensor_name] = values[tensor_name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, **{"quantization" if kind.pack is mlx else "quantization_config": kind.config})
    return directory, values


def write_as_gptq(source: Path, directory: Path, group: int) -> Path:
    """Write a copy of a checkpoint in one file, whose layers are in GPTQ's format."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in name:
            parts = round_to_gptq(tensor, group)
            stored |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config={**_gptq().config, "group_size": group})
    return directory


def change_config(directory: Path, **values: Any) -> None:
    """Change values of config.json; None removes one."""
    config = json.loads((directory / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None or name not in values}
    (directory / "config.json").write_text(json.dumps(config))


def write_values(folder: Path, values: Mapping[str, Tensor], **overrides: Any) -> Path:
    """A checkpoint that is not quantized, with the values of a quantized one."""
    directory = write_checkpoint(folder / "values", **{**SIZES, **overrides})
    save_file(dict(values), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
