"""Tiny checkpoints of gpt-oss whose experts are in MXFP4, packed by the definition of the format, and their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.weights.checkpoint import open_checkpoint
from armature_bench.engine.gguf_file import write_shape
from gguf_files import write_tokenizer as write_gguf_tokenizer
from served_families import SERVED, write_family
from tiny_checkpoints import write_tokenizer

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


# Names in a layer, as llama.cpp's converter writes them.
GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    **{
        f"self_attn.{ours}_proj.{kind}": f"attn_{theirs}.{kind}"
        for ours, theirs in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
        for kind in ("weight", "bias")
    },
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
}
OTHER_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_blocks(blocks: Tensor, scales: Tensor) -> np.ndarray[Any, Any]:
    """The same codes in GGUF's blocks of 17 bytes: the scale, then codes i and i + 16 of a block in byte i."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    packed = torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1)
    return packed.flatten(-2).numpy()


def write_mxfp4_gguf(packed: Path, file: Path, kind: str = "MXFP4") -> Path:
    """The checkpoint in MXFP4 as a GGUF file, with its experts in MXFP4, or their values in F32."""
    config = open_checkpoint(packed).decoder
    assert config.experts is not None and config.ropes[0] is not None, "a gpt-oss"
    writer = gguf.GGUFWriter(file, "gpt-oss")
    write_shape(writer, config, config.ropes[0])
    writer.add_expert_count(config.experts.routing.num_experts)
    writer.add_expert_used_count(config.experts.routing.top_k)
    writer.add_expert_feed_forward_length(config.experts.size)
    writer.add_sliding_window(config.windows[0])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.ropes[0].factor)
    writer.add_rope_scaling_orig_ctx_len(config.ropes[0].original_max_position_embeddings)
    write_gguf_tokenizer(writer, packed)
    tensors = load_file(packed / "model.safetensors")
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if name in OTHER_GGUF_NAMES:
            writer.add_tensor(OTHER_GGUF_NAMES[name], tensor.float().numpy())
        elif part in GGUF_NAMES:
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}", tensor.float().numpy())
        elif part.endswith("_bias"):
            for theirs, own in _products(part, tensor):
                writer.add_tensor(f"blk.{layer}.{theirs}.bias", own.float().numpy())
        elif part.endswith("_blocks"):
            scales = dict(_products(part, tensors[name.replace("_blocks", "_scales")]))
            for theirs, own in _products(part, tensor):
                place = f"blk.{layer}.{theirs}.weight"
                if kind == "MXFP4":
                    stored = gguf_blocks(own, scales[theirs])
                    writer.add_tensor(place, stored, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                else:
                    writer.add_tensor(place, mxfp4_values(own, scales[theirs]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _products(part: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Tensors of all experts by their names in a GGUF file; gates and ups take turns in the checkpoint."""
    if "down_proj" in part:
        return [("ffn_down_exps", tensor)]
    return [("ffn_gate_exps", tensor[:, 0::2].contiguous()), ("ffn_up_exps", tensor[:, 1::2].contiguous())]
