"""Reference models: transformers, run eagerly in FP32 on the same checkpoint directory."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its optional parts say at import what they lack
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of one whole forward pass. Weights that transformers misses or does not know fail the test."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    complaints = {name: found for name, found in info.items() if found}
    assert not complaints, f"transformers reads this checkpoint otherwise: {complaints}"
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def write_random_model(directory: Path, values: dict[str, object], seed: int = 7) -> None:
    """Write a checkpoint as transformers does, with random weights that keep activations near 1, from a config.json."""
    given = {name: value for name, value in values.items() if value is not None}
    config = transformers.AutoConfig.for_model(**given)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if "inv_freq" in name:
            continue
        if tensor.dim() > 1:
            tensor.copy_(noise if "embed" in name else noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.copy_(noise * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
