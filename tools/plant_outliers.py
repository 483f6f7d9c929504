"""A checkpoint with outlier channels, as large models have them, that is the same function: `python -m tools.plant_outliers DIR OUT`.

In each layer, some channels of the norms are multiplied by 30 to 100 and the weights behind them divided by as much; kept in FP32.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory of a Llama, in one file")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--channels", type=int, default=8, help="of each norm")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.checkpoint, arguments.out, arguments.channels, arguments.seed)
    return 0


def write(checkpoint: Path, out: Path, channels: int, seed: int) -> None:
    """All files of the checkpoint, with other weights."""
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(plant(tensors, channels, seed), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2) + "\n")


def plant(tensors: dict[str, Tensor], channels: int, seed: int) -> dict[str, Tensor]:
    """The same names and shapes."""
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
