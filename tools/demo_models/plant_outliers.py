"""Write a checkpoint with outlier channels, as large models have.

`python -m tools.demo_models.plant_outliers DIR OUT`.
The checkpoint computes the same function. In each layer, some channels of the norms are multiplied by 30 to 100, and
the weights after them divided by the same factor. Weights are kept in FP32. With `--keys F`, two pairs of channels of
each key head are multiplied by F, and those of the queries divided by it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FED = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LEAST, MOST = 30.0, 100.0
KEY_PAIRS = 2  # per head


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory of a Llama checkpoint, in one file")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--channels", type=int, default=8, help="outlier channels of each norm")
    parser.add_argument("--keys", type=float, default=1.0, help="factor of some channels of keys")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.checkpoint, arguments.out, arguments.channels, arguments.seed, arguments.keys)
    return 0


def write(checkpoint: Path, out: Path, channels: int, seed: int, keys: float = 1.0) -> None:
    """Write all files of the checkpoint with the changed weights."""
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    config = json.loads((out / "config.json").read_text())
    planted = plant(tensors, channels, seed)
    if keys != 1.0:
        planted = plant_keys(
            planted, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], keys, seed
        )
    save_file(planted, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2) + "\n")


def plant_keys(tensors: dict[str, Tensor], head_dim: int, factor: float, seed: int) -> dict[str, Tensor]:
    """Multiply pairs of key channels. Both channels of a RoPE pair get the same factor, so RoPE is unaffected."""
    generator = torch.Generator().manual_seed(seed)
    planted = dict(tensors)
    for name in sorted(tensors):
        if not name.endswith("self_attn.k_proj.weight"):
            continue
        kv_heads, half = len(tensors[name]) // head_dim, head_dim // 2
        factors = torch.ones(kv_heads, 2, half)
        for head in factors:
            head[:, torch.randperm(half, generator=generator)[:KEY_PAIRS]] = factor
        planted[name] = tensors[name] * factors.view(-1, 1)
        asking = name.replace("k_proj", "q_proj")
        group = len(tensors[asking]) // len(tensors[name])
        planted[asking] = tensors[asking] / factors.view(kv_heads, 1, -1).expand(-1, group, -1).reshape(-1, 1)
    return planted


def plant(tensors: dict[str, Tensor], channels: int, seed: int) -> dict[str, Tensor]:
    """Return tensors of the same names and shapes with outliers in the norms."""
    generator = torch.Generator().manual_seed(seed)
    planted = dict(tensors)
    for name in sorted(tensors):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in FED:
            continue
        size = tensors[name].numel()
        factor = torch.ones(size)
        chosen = torch.randperm(size, generator=generator)[:channels]
        factor[chosen] = LEAST + (MOST - LEAST) * torch.rand(len(chosen), generator=generator)
        planted[name] = tensors[name] * factor
        for fed in FED[norm]:
            planted[f"{layer}.{fed}.weight"] = tensors[f"{layer}.{fed}.weight"] / factor
    return planted


if __name__ == "__main__":
    sys.exit(main())
