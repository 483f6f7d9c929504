"""Random LoRA adapters of tiny checkpoints in peft's layout, and checkpoints with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from app.weights.checkpoint import open_checkpoint
from app.weights.lora.adapter import adapted_layers

PREFIX = "base_model.model."


def adapter_tensors(
    base: Path, rank: int = 4, seed: int = 0, adapts: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in adapted_layers(open_checkpoint(base).decoder).items():
        if adapts(name):
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a / inputs**0.5, b / 4
    return tensors


def write_adapter(
    directory: Path,
    base: Path,
    rank: int = 4,
    seed: int = 0,
    adapts: Callable[[str], bool] = lambda name: True,
    tensors: dict[str, torch.Tensor] | None = None,
    **values: Any,
) -> Path:
    """An adapter's directory; `values` change its config, None removes a value."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "org/base"}
    config = {name: value for name, value in (config | values).items() if value is not None}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors or adapter_tensors(base, rank, seed, adapts), directory / "adapter_model.safetensors")
    return directory


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """The base with W + scale * B A, as peft's merge_and_unload computes it."""
    shutil.copytree(base, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, tensors = load_file(target / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        scale = config["lora_alpha"] / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        layer = name.removeprefix(PREFIX).replace(".lora_A", "")
        weights[layer] = weights[layer] + scale * (b @ a)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
