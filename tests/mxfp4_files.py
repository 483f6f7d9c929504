"""Tiny checkpoints of gpt-oss whose experts are in MXFP4, packed by the definition of the format, and their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_checkpoints import write_tokenizer
from tools.measure.families import SERVED, write_family

GPT_OSS = "GptOssForCausalLM"
# Inputs come in groups of 32.
SIZES: dict[str, Any] = {**SERVED[GPT_OSS], "hidden_size": 64, "intermediate_size": 96}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def drawn_mxfp4(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Random blocks [experts, outputs, inputs / 32, 16] and scales [experts, outputs, inputs / 32]; values are near 1 / 16."""
    generator = torch.Generator().manual_seed(outputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
    scales = torch.randint(119, 123, (experts, outputs, inputs // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values [experts, outputs, inputs] in FP32."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    return (E2M1[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(2)


def write_mxfp4(folder: Path, **values: Any) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one with the same values as transformers stores them, in BF16's numbers."""
    packed, exact = folder / "mxfp4", folder / "values"
    sizes = {**SIZES, **values}
    for directory in (packed, exact):
        write_family(directory, GPT_OSS, sizes)
        write_tokenizer(directory)
    tensors = load_file(exact / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = drawn_mxfp4(tensor.shape[0], tensor.shape[2], tensor.shape[1])
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = mxfp4_values(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, exact / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, exact
