"""Reference encoders: transformers, run eagerly in FP32 on the same checkpoint directory, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.messages import Text
from reference_models import transformers

UNUSED = "pooler."  # transformers makes a new one for a base model whose file has none; its hidden states are not touched by it


class Reference:
    """A checkpoint as transformers reads it."""

    def __init__(self, directory: Path, classifies: bool) -> None:
        """Weights that it misses or does not know fail the test."""
        auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
        self.model, info = auto.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
        complaints = {name: [one for one in found if UNUSED not in one] for name, found in info.items() if found}
        assert not any(complaints.values()), f"transformers reads this checkpoint otherwise: {complaints}"
        self.classifies = classifies

    @torch.inference_mode()
    def hidden(self, texts: Sequence[Text]) -> Tensor:
        """Last hidden states [tokens of all texts, hidden]."""
        base = getattr(self.model, self.model.base_model_prefix, self.model)
        return torch.cat([base(**_inputs(text, base)).last_hidden_state[0] for text in texts])

    @torch.inference_mode()
    def logits(self, texts: Sequence[Text]) -> Tensor:
        """Of a classifier: [texts, labels]."""
        return torch.cat([self.model(**_inputs(text, self.model)).logits for text in texts])


def _inputs(text: Text, model: Any) -> dict[str, Any]:
    ids = torch.tensor([text.token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if text.type_ids:
        inputs["token_type_ids"] = torch.tensor([text.type_ids])
    if model.config.model_type in ("llama", "qwen3", "mistral", "gemma3_text"):
        inputs["use_cache"] = False
    return inputs
