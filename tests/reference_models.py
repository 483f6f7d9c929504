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
