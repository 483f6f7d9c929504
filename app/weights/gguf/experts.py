"""Translates what a GGUF file says about a mixture of experts: its metadata and its tensors. Torch is not needed.

llama.cpp keeps each of the three weights of all experts of a layer in one tensor [experts, rows, columns]; files made
before April 2024 have one tensor for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.gguf.reader import GgufTensor

# Names in a layer `blk.N` and in `model.layers.N`.
EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SELECTION_BIAS = ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")
# Tensors of all experts, and the weights of one expert in them, one below the other.
MERGED_NAMES: Mapping[str, tuple[str, ...]] = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_MERGED = re.compile(rf"blk\.(\d+)\.({'|'.join(MERGED_NAMES)})\.weight")
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
# Whether llama.cpp divides the weights of a token's experts by their sum, by model type. GLM's files say it.
RENORMALIZES: Mapping[str, bool] = {
    "mixtral": True, "granitemoe": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False,
}  # fmt: skip
SOFTMAX, SIGMOID = 1, 2  # `enum llama_expert_gating_func_type`


def expert_values(model_type: str, read: ConfigReader) -> dict[str, Any]:
    """Return the values of config.json about experts.

    Args:
        model_type: The model type of config.json.
        read: The metadata of the architecture, without its prefix.

    Raises:
        CheckpointInvalid: A value is missing or wrong, or experts are selected by another rule than llama.cpp's for
            this architecture.
    """
    used, inner = read.integer("expert_used_count"), read.integer("feed_forward_length")
    values: dict[str, Any] = {
        "num_local_experts": read.integer("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": read.integer("expert_feed_forward_length", max(1, inner // used)),
        "norm_topk_prob": RENORMALIZES.get(model_type, False),
    }
    scale = factor(read, "expert_weights_scale")
    has_sigmoid = model_type == "glm4_moe"
    if read.integer("expert_gating_func", 0, at_least=0) not in (0, SIGMOID if has_sigmoid else SOFTMAX):
        raise CheckpointInvalid(f"{read.where}.expert_gating_func is not the one of this architecture in llama.cpp.")
    if has_sigmoid:
        return values | {
            "norm_topk_prob": read.boolean("expert_weights_norm", False),
            "routed_scaling_factor": scale,
            "first_k_dense_replace": read.integer("leading_dense_block_count", 0, at_least=0),
            "n_shared_experts": read.integer("expert_shared_count", 0, at_least=0),
            "n_group": read.integer("expert_group_count", 0, at_least=0) or 1,
            "topk_group": read.integer("expert_group_used_count", 0, at_least=0) or 1,
        }
    if scale != 1:
        raise CheckpointInvalid(f"{read.where}.expert_weights_scale is {scale:g}, which is not supported.")
    if model_type == "qwen2_moe":
        values["shared_expert_intermediate_size"] = read.integer("expert_shared_feed_forward_length", inner)
    return values


def factor(read: ConfigReader, name: str, default: float = 1.0) -> float:
    """Return a factor; one that is missing or 0 has its default."""
    return read.number(name) if read.values.get(name) else default


def expert_tensors(name: str, tensor: GgufTensor, experts: int) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the checkpoint's names of a tensor of experts with their parts of it.

    Nothing is yielded for other tensors, and for those that do not hold this number of experts.
    """
    single, merged = _SINGLE.fullmatch(name), _MERGED.fullmatch(name)
    if single is not None:
        yield f"model.layers.{single[1]}.mlp.experts.{single[3]}.{single[2]}_proj.weight", tensor
    elif merged is not None and len(tensor.shape) == 3 and tensor.shape[0] == experts:
        parts = MERGED_NAMES[merged[2]]
        rows = tensor.shape[1] // len(parts)
        row_bytes = (tensor.end - tensor.start) // (experts * tensor.shape[1])
        for expert in range(experts):
            for place, part in enumerate(parts):
                start = tensor.start + (expert * tensor.shape[1] + place * rows) * row_bytes
                own = replace(tensor, shape=(rows, tensor.shape[2]), start=start, end=start + rows * row_bytes)
                yield f"model.layers.{merged[1]}.mlp.experts.{expert}.{part}.weight", own
    elif name.endswith(f".{SELECTION_BIAS[0]}"):
        yield f"model.layers.{name.split('.')[1]}.{SELECTION_BIAS[1]}", tensor
    elif name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        own = replace(tensor, shape=(1, *tensor.shape))  # the only row of the gate of the shared expert
        yield f"model.layers.{name.split('.')[1]}.{EXPERT_NAMES['ffn_gate_inp_shexp']}.weight", own
