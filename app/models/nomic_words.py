"""Translates the first config.json files of Nomic's encoders from GPT-2's names to those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import CheckpointInvalid
from app.models.fields import Fields

_NAMES: Mapping[str, str] = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
# Values that are required, since others would need another computation.
_MUST: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "use_rms_norm": (False, None),
    "rotary_emb_interleaved": (False,),
    "rotary_scaling_factor": (None,),
    "rotary_emb_scale_base": (None,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "num_experts": (0, None),
    "parallel_block": (False,),
}


def in_new_words(config: Fields) -> Fields:
    """Return the config with transformers' names. Raises `CheckpointInvalid` for unsupported values."""
    if not config.has("n_embd"):
        return config
    for name, allowed in _MUST.items():
        if name in config.values and config.values[name] not in allowed:
            raise CheckpointInvalid(f"config.json: {name} {config.values[name]!r} is not supported; {allowed[0]!r} is.")
    renamed = {new: config.values[old] for old, new in _NAMES.items() if config.has(old)}
    return Fields({**config.values, **renamed, "hidden_act": "silu"})
