"""Translates the metadata of families whose layers differ: those with a recurrent state, and Gemma 4.

The names and values are those of llama.cpp's `llama-arch.cpp` and `src/models`. Torch is not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from io import BufferedReader
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.files import open_regular
from app.weights.gguf.reader import GgufModel, GgufTensor

# Tensors that hold divisors of the rotary frequencies; config.json has them as lists.
ROPE_DIVISORS = "rope_freqs.weight"
# Values that these families may have for each layer; elsewhere config.json has the largest.
BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length")
_MAX_DIVISORS = 2**16
_NO_ROTATION = 1e20  # a divisor above this stands for a frequency of 0
Values = dict[str, Any]


def factor(read: ConfigReader, name: str, default: float = 1.0) -> float:
    """Return a factor; one that is missing or 0 has its default."""
    return read.number(name) if read.values.get(name) else default


def granite(read: ConfigReader, head_dim: int) -> Values:
    return {
        "attention_multiplier": factor(read, "attention.scale", head_dim**-0.5),
        "embedding_multiplier": factor(read, "embedding_scale"),
        "residual_multiplier": factor(read, "residual_scale"),
        "logits_scaling": factor(read, "logit_scale"),
    }


def floats(tensor: GgufTensor) -> list[float]:
    """Return the values of a short row of F32. Raises `CheckpointInvalid` for another tensor."""
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_DIVISORS:
        raise CheckpointInvalid(f"{tensor.file.name}: the factors of rotary embeddings must be one row of F32.")
    with BufferedReader(open_regular(tensor.file)) as stream:
        stream.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(4 * tensor.shape[0])))


class LayerValues:
    """Values of a file's metadata that it has for each layer, or once for all of them."""

    def __init__(self, model: GgufModel, read: ConfigReader, layers: int) -> None:
        self.model, self.read, self.layers = model, read, layers
        self._prefix = f"{model.metadata['general.architecture']}."

    def __call__(self, name: str, default: Any = None) -> tuple[Any, ...]:
        """Return one value for each layer, without those that predict further tokens. Raises `CheckpointInvalid`."""
        self.read.values.get(name)  # so that it is known to be read
        found = self.model.metadata.get(self._prefix + name, default)
        if not isinstance(found, tuple):
            return (found,) * self.layers
        if len(found) < self.layers:
            raise CheckpointInvalid(f"{self.read.where}.{name} must have a value for each of {self.layers} layers.")
        return found[: self.layers]

    def has(self, part: str) -> bool:
        """Return True if a layer has this tensor."""
        return any(f"blk.{layer}.{part}" in self.model.tensors for layer in range(self.layers))


def delta_rule(each: LayerValues) -> Values:
    """Return the values of the gated delta rule of Qwen 3.5 and Qwen3-Next, whose tensors are not fused in files."""
    read = each.read
    interval = read.integer("full_attention_interval", 4)
    states = each("attention.recurrent_layers")
    if states[0] is None:
        states = tuple((layer + 1) % interval != 0 for layer in range(each.layers))
    heads = read.integer("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if has_state else "full_attention" for has_state in states],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_value_head_dim": max(1, read.integer("ssm.inner_size") // heads),
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
        "shared_expert_intermediate_size": read.integer("expert_shared_feed_forward_length", 1),
        "fused_products": False,
    }


def mamba(each: LayerValues) -> Values:
    """Return the values of Mamba-2, by the names of Bamba."""
    read = each.read
    heads = read.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, read.integer("ssm.inner_size") // heads),
        "mamba_n_groups": read.integer("ssm.group_count"),
        "mamba_d_state": read.integer("ssm.state_size"),
        "mamba_d_conv": read.integer("ssm.conv_kernel"),
        "mamba_conv_bias": each.has("ssm_conv1d.bias"),
    }


def granite_hybrid(each: LayerValues) -> Values:
    """Return the values of Granite 4: a layer without heads of keys has a state."""
    read = each.read
    head_dim = read.integer("embedding_length") // read.integer("attention.head_count")
    rotates = read.boolean("rope.scaling.finetuned", True)
    if rotates and read.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointInvalid(f"{read.where}: rotary embeddings of a part of a head are not supported.")
    inner = read.integer("feed_forward_length")
    return {
        **granite(read, head_dim),
        **mamba(each),
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in each("attention.head_count_kv")],
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": read.integer("expert_count", 0, at_least=0),
        "shared_intermediate_size": read.integer("expert_shared_feed_forward_length", inner),
        "fused_products": False,
    }


def nemotron_h(each: LayerValues) -> Values:
    """Return the values of Nemotron-H: a layer has keys, an inner size, or else a state."""
    read, inner, heads = each.read, each("feed_forward_length"), each("attention.head_count_kv")
    read.values.get("attention.layer_norm_epsilon")  # of the last norm of layers that predict further tokens
    branch = "moe" if read.integer("expert_count", 0, at_least=0) else "mlp"
    words = ["attention" if keys else branch if size else "mamba" for keys, size in zip(heads, inner, strict=True)]
    values: Values = {
        **mamba(each),
        "layers_block_type": words,
        "mlp_bias": each.has("ffn_up.bias"),
    }
    if branch == "mlp":
        return values
    return values | {
        "moe_shared_expert_intermediate_size": read.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": read.optional_integer("moe_latent_size") or None,
    }


def falcon_h1(each: LayerValues) -> Values:
    """Return the values of Falcon-H1, whose factors are part of the weights in a file."""
    return {
        **mamba(each),
        "mamba_rms_norm": each.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": False,
        "attention_bias": False,
    }


def lfm2(each: LayerValues) -> Values:
    """Return the values of LFM2: a layer without heads of keys has a short convolution."""
    words = ["full_attention" if heads else "conv" for heads in each("attention.head_count_kv")]
    more = {"conv_L_cache": each.read.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    return {"layer_types": words, "norm_eps": each.read.number("attention.layer_norm_rms_epsilon"), **more}


def gemma4(each: LayerValues) -> Values:
    """Return the values of Gemma 4, whose layers with full attention have other heads than those with a window."""
    read = each.read
    windowed, kv_heads = each("attention.sliding_window_pattern"), each("attention.head_count_kv")
    if not all(isinstance(one, bool) for one in windowed):
        raise CheckpointInvalid(f"{read.where}.attention.sliding_window_pattern must have a value for each layer.")
    full = [layer for layer in range(each.layers) if not windowed[layer]]
    shared, inner = read.integer("attention.shared_kv_layers", 0, at_least=0), each("feed_forward_length")
    size = read.integer("attention.key_length")
    table = each.model.tensors.get("per_layer_token_embd.weight")
    values: Values = {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in windowed],
        "sliding_window": read.integer("attention.sliding_window"),
        "head_dim": read.integer("attention.key_length_swa", size),
        "global_head_dim": size,
        "num_kv_shared_layers": shared,
        "num_key_value_heads": next(
            (one for one, slides in zip(kv_heads, windowed, strict=True) if slides), kv_heads[0]
        ),
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in each.model.tensors,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": read.integer("embedding_length_per_layer_input", 0, at_least=0),
        "vocab_size_per_layer_input": 1 if table is None else table.shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": read.optional_number("final_logit_softcapping"),
        "rope_parameters": _gemma4_ropes(each, size),
        "enable_moe_block": read.integer("expert_count", 0, at_least=0) > 0,
    }
    if full:
        values["num_global_key_value_heads"] = kv_heads[full[0]]
    if values["enable_moe_block"]:
        values |= {"num_experts": read.integer("expert_count"), "top_k_experts": read.integer("expert_used_count")}
    for name in ("attention.value_length_swa", "rope.dimension_count_swa", "rope.dimension_count"):
        read.values.get(name)
    return values


def _gemma4_ropes(each: LayerValues, size: int) -> Values:
    """Return both rotary embeddings. A large divisor says that a pair of a layer with full attention does not rotate."""
    read, divisors = each.read, each.model.tensors.get(ROPE_DIVISORS)
    rotated = size // 2 if divisors is None else sum(one < _NO_ROTATION for one in floats(divisors))
    full = {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / size}
    return {
        "full_attention": {**full, "rope_theta": read.number("rope.freq_base", 10_000.0)},
        "sliding_attention": {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10_000.0)},
    }


# What is read beside the usual values, by the model type of config.json.
READERS: Mapping[str, Callable[[LayerValues], Values]] = {
    "qwen3_next": delta_rule,
    "qwen3_5_text": delta_rule,
    "qwen3_5_moe_text": delta_rule,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "gemma4_text": gemma4,
    "lfm2": lfm2,
}
