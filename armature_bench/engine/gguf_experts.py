"""What a GGUF file says about a mixture of experts: its metadata, and one tensor for each weight of all experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import ExpertsConfig
from app.weights.gguf.config import MERGED_NAMES, RENORMALIZES, SIGMOID, SOFTMAX, WHOLE_NAMES

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")
_MERGED = {parts[0]: merged for merged, parts in MERGED_NAMES.items() if len(parts) == 1}
_WHOLE_NAMES = {ours: theirs for theirs, ours in WHOLE_NAMES.items()}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def require_experts(config: ModelConfig, model_type: str) -> None:
    """Raise `CheckpointInvalid` for a mixture of experts that llama.cpp would compute in another way.

    Layers are dense that it reads experts of, or the weights of experts have another sum.
    """
    experts = config.experts
    if experts is None:
        return
    has_first = model_type == "glm4_moe"
    if not all(experts.layers[_first_layer(experts) if has_first else 0 :]):
        raise CheckpointInvalid(
            f"A {config.architecture} with dense layers among its experts cannot be converted to GGUF."
        )
    if experts.routing.renormalize != RENORMALIZES.get(model_type, experts.routing.renormalize):
        raise CheckpointInvalid(
            f"A {config.architecture} with norm_topk_prob: {str(experts.routing.renormalize).lower()} cannot be converted"
            " to GGUF: llama.cpp computes the other rule."
        )


def _first_layer(experts: ExpertsConfig) -> int:
    return experts.layers.index(True) if any(experts.layers) else len(experts.layers)


def write_expert_values(writer: Any, config: ModelConfig) -> None:
    """Write the metadata of the experts of a model, which may have none, to a `gguf.GGUFWriter`."""
    experts = config.experts
    if experts is None:
        return
    routing = experts.routing
    writer.add_expert_count(routing.num_experts)
    writer.add_expert_used_count(routing.top_k)
    writer.add_expert_feed_forward_length(experts.size)
    writer.add_uint32(f"{writer.arch}.expert_gating_func", SIGMOID if routing.scoring == "sigmoid" else SOFTMAX)
    if routing.scoring == "sigmoid":
        writer.add_leading_dense_block_count(_first_layer(experts))
        writer.add_expert_weights_norm(routing.renormalize)
        writer.add_expert_weights_scale(routing.scale)
        writer.add_expert_shared_count(experts.shared_size // experts.size)
        writer.add_expert_group_count(routing.num_groups)
        writer.add_expert_group_used_count(routing.top_groups)
    elif experts.shared_size:
        writer.add_expert_shared_feed_forward_length(experts.shared_size)
    if config.architecture == "GraniteMoeForCausalLM":  # `ModelConfig` has no factor of branches
        writer.add_attention_scale(config.attention_scale)
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_logit_scale(1 / config.logit_scale)


def merged_name(name: str) -> str | None:
    """Return the GGUF name of the tensor that an expert's weight, or the bias of the selection, is in."""
    expert, part = _EXPERT.fullmatch(name), _IN_LAYER.fullmatch(name)
    if part is not None and part[2] in _WHOLE_NAMES:
        return f"blk.{part[1]}.{_WHOLE_NAMES[part[2]]}"
    return None if expert is None else f"blk.{expert[1]}.{_MERGED[expert[3]]}.weight"


def stacked_names(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the tensors that each GGUF tensor is stacked of, in order, from the GGUF name of each tensor."""
    stacks: dict[str, list[str]] = {}
    for name, theirs in names.items():
        stacks.setdefault(theirs, []).append(name)
    return stacks
