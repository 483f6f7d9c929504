"""The draft head of a checkpoint, as a checkpoint of its own: Qwen 3.5 stores it under `mtp.`."""

from __future__ import annotations

from dataclasses import replace

from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.weights.checkpoint import Checkpoint, decoder_tensors, stored_tensors

_PREFIX = "mtp."


def open_draft_head(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the head's checkpoint; None if the files hold none, or more than one."""
    config = checkpoint.model_config
    if not isinstance(config, ModelConfig) or checkpoint.gguf is not None:
        return None
    if not DECODER_FAMILIES[config.architecture].has_draft_head:
        return None
    stored = stored_tensors(checkpoint.directory, checkpoint.config)
    own = {f"model.{name.removeprefix(_PREFIX)}": entry for name, entry in stored.items() if name.startswith(_PREFIX)}
    if "model.fc.weight" not in own or any(name.startswith("model.layers.1.") for name in own):
        return None
    own["model.served_norm.weight"] = checkpoint.tensors["model.norm.weight"]
    head = config.draft_head()
    return replace(checkpoint, model_config=head, tensors=decoder_tensors(head, own))
