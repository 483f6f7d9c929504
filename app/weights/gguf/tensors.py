"""Maps the tensors of a GGUF file to the names and shapes of a Hugging Face checkpoint. Torch is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.weights.gguf.config import EXPERT_NAMES, ROPE_FACTORS, WHOLE_NAMES, GgufFamily, expert_tensors
from app.weights.gguf.hybrid import ROPE_DIVISORS
from app.weights.gguf.reader import TYPES, GgufModel, GgufTensor
from app.weights.safetensors import EncodedEntry, TensorEntry

OTHER_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# Names in a layer `blk.N` and in `model.layers.N`.
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Further names by model type, which come first.
_FAMILY_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen3": {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_STATE_NAMES = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
# Tensors of a state whose kinds are part of our names.
STATE_VECTORS = {"ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D"}
_MAMBA_NAMES = {**EXPERT_NAMES, **{theirs: f"mamba.{ours}" for theirs, ours in _STATE_NAMES.items()}}
_DELTA_NAMES = {
    **_FAMILY_NAMES["qwen3"],
    **EXPERT_NAMES,
    **{theirs: f"linear_attn.{ours}" for theirs, ours in _STATE_NAMES.items()},
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "post_attention_norm": "post_attention_layernorm",
}
NAMES: Mapping[str, Mapping[str, str]] = {
    **_FAMILY_NAMES,
    "gemma4_text": {
        **_FAMILY_NAMES["qwen3"],
        **_FAMILY_NAMES["gemma2"],
        **EXPERT_NAMES,
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_NAMES),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "falcon_h1"), _MAMBA_NAMES),
    "gemma3_text": {**_FAMILY_NAMES["qwen3"], **_FAMILY_NAMES["gemma2"]},
    "qwen3_vl": _FAMILY_NAMES["qwen3"],
    "qwen3_vl_moe": {**_FAMILY_NAMES["qwen3"], **EXPERT_NAMES},
    "lfm2": {
        **_FAMILY_NAMES["qwen3"],
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "token_embd_norm": "model.norm",
    },
    "mixtral": EXPERT_NAMES,
    "granitemoe": EXPERT_NAMES,
    "qwen2_moe": EXPERT_NAMES,
    "qwen3_moe": {**_FAMILY_NAMES["qwen3"], **EXPERT_NAMES},
    "olmoe": {**_FAMILY_NAMES["qwen3"], **EXPERT_NAMES},
    "glm4_moe": {
        **_FAMILY_NAMES["qwen3"],
        **EXPERT_NAMES,
        "post_attention_norm": "post_attention_layernorm",
    },
    "gpt_oss": {**EXPERT_NAMES, "post_attention_norm": "post_attention_layernorm"},
}


@dataclass(frozen=True, slots=True)
class BlockEntry(EncodedEntry):
    """A tensor of a GGUF file whose values are computed when they are read.

    `kind` is the type in the file. `rows` are the rows of the file in our order, and `columns` its groups of equally many
    columns; None: all of them, as they are. `added` was added to each value in the file. `is_rate`: the file has minus
    the exponentials of the values.
    """

    kind: str
    rows: tuple[int, ...] | None = field(default=None, repr=False)
    columns: tuple[int, ...] | None = None
    added: float = 0.0
    is_rate: bool = False

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row; of a vector, of one value."""
        kind = TYPES[self.kind]
        return max(1, math.prod(self.shape[1:]) // kind.values) * kind.nbytes


@dataclass(frozen=True, slots=True)
class Changes:
    """What a tensor needs before it is that of a checkpoint; `shape`: its shape there."""

    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    added: float = 0.0
    is_rate: bool = False


def checkpoint_tensors(model: GgufModel, family: GgufFamily, config: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return the tensors by their names in a checkpoint; one that has no such name has its own."""
    heads = {}
    if family.interleaves_heads:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, TensorEntry] = {}
    for name, tensor in model.tensors.items():
        if name in (ROPE_DIVISORS, *ROPE_FACTORS):
            continue  # these are in the configuration
        if _predicts_further(name, config):
            continue
        experts = dict(expert_tensors(name, tensor, config.get("num_local_experts", 0)))
        if family.model_type == "gemma4_text":  # its checkpoints have them beside the MLP
            experts = {ours.replace(".mlp.experts.", ".experts."): own for ours, own in experts.items()}
        found.update((ours, gguf_entry(own)) for ours, own in experts.items())
        if experts:
            continue
        part = name.split(".")[2] if name.startswith("blk.") and name.count(".") > 1 else ""
        part = "ssm_conv1d" if ".shortconv.conv." in name else part  # filters as well
        if part == "ssm_ba":
            found.update(_separate_scales(name, tensor, config))
            continue
        changes = state_changes(part, tensor, config, family) if "linear_num_key_heads" in config else None
        if changes is None:
            rows = interleaved(tensor, heads[part]) if part in heads else None
            added = 1.0 if family.adds_one and name.endswith("_norm.weight") and part != "ssm_norm" else 0.0
            changes = Changes(_shape_here(part, tensor), rows, added=added, is_rate=part == "ssm_a")
        found[_name_here(name, family)] = gguf_entry(tensor, changes)
    return found


def _predicts_further(name: str, config: Mapping[str, Any]) -> bool:
    layer, num_layers = name.removeprefix("blk.").partition(".")[0], config["num_hidden_layers"]
    return layer.isdecimal() and num_layers <= int(layer) < num_layers + config["num_nextn_predict_layers"]


def interleaved(tensor: GgufTensor, heads: int) -> tuple[int, ...] | None:
    """Return the rows of heads, of which the file has row i + j · (half a head) as row 2i + j."""
    if tensor.shape[0] % (2 * heads) or len(tensor.shape) > 2:
        return None  # the shape is wrong and is refused later, by name
    half = tensor.shape[0] // heads // 2
    return tuple(2 * (head * half + pair) + other for head in range(heads) for other in (0, 1) for pair in range(half))


def _shape_here(part: str, tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape in a checkpoint: filters have a dimension more, vectors of a state have one dimension."""
    if part == "ssm_conv1d" and len(tensor.shape) == 2:
        return tensor.shape[0], 1, tensor.shape[1]
    return (math.prod(tensor.shape),) if part in ("ssm_a", "ssm_d", "ssm_norm") else tensor.shape


def state_changes(part: str, tensor: GgufTensor, config: Mapping[str, Any], family: GgufFamily) -> Changes | None:
    """Return what changes in a tensor of the gated delta rule; None for other tensors and in families as checkpoints.

    The file repeats the heads of keys as a whole: of G heads of keys, its value head j · G + g is our head g · n + j,
    where n heads of values share one of keys.
    """
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, shared = config["linear_value_head_dim"], heads // keys
    order = tuple(place * keys + key for key in range(keys) for place in range(shared))
    first = 2 * keys * config["linear_key_head_dim"]  # rows of queries and keys
    wide, shape = tuple(head * size + one for head in order for one in range(size)), _shape_here(part, tensor)
    if not family.tiles_values or keys * shared != heads:
        return None
    if part == "ssm_out":
        return Changes(shape, columns=order)
    rows = {
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), (*range(first), *(first + row for row in wide))),
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), order),
        "attn_gate": wide,
    }.get(part)
    if rows is None or shape[0] != len(rows):
        return None
    return Changes(shape, rows, is_rate=part == "ssm_a")


def _separate_scales(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return both parts of a tensor that has, for each head of keys, the rows of its betas and of its steps."""
    keys, layer = config["linear_num_key_heads"], name.split(".")[1]
    shared = config["linear_num_value_heads"] // keys
    if tensor.shape[0] != 2 * keys * shared:
        return {name: gguf_entry(tensor, Changes(tensor.shape))}
    found = {}
    for place, part in enumerate("ba"):
        rows = tuple(2 * key * shared + place * shared + one for key in range(keys) for one in range(shared))
        ours = f"model.layers.{layer}.linear_attn.in_proj_{part}.weight"
        found[ours] = gguf_entry(tensor, Changes((len(rows), *tensor.shape[1:]), rows))
    return found


def gguf_entry(tensor: GgufTensor, changes: Changes | None = None) -> TensorEntry:
    changes = Changes(tensor.shape) if changes is None else changes
    place = changes.shape, tensor.start, tensor.end
    alike = changes == Changes(changes.shape)
    if alike and not TYPES[tensor.kind].is_quantized:
        return TensorEntry(tensor.file, tensor.kind, *place)
    dtype = "F32" if TYPES[tensor.kind].is_quantized else tensor.kind
    return BlockEntry(
        tensor.file,
        dtype,
        *place,
        kind=tensor.kind,
        rows=changes.rows,
        columns=changes.columns,
        added=changes.added,
        is_rate=changes.is_rate,
    )


def _name_here(name: str, family: GgufFamily) -> str:
    """Return the checkpoint's name: `blk.3.ffn_up.weight` becomes `model.layers.3.mlp.up_proj.weight`."""
    start, _, rest = name.partition(".")
    layer, _, own = rest.partition(".")
    own = "ffn_norm.weight" if own == "ffn_norm" else own  # of Falcon-H1
    names = NAMES.get(family.model_type, {})
    if start != "blk" or not layer.isdecimal():
        stem, _, kind = name.rpartition(".")
        other = names.get(stem) or OTHER_NAMES.get(stem)
        return f"{other}.{kind}" if other else name
    if own in STATE_VECTORS:
        whole: str | None = f"{names.get('ssm_out', '').partition('.')[0]}.{STATE_VECTORS[own]}"
    else:
        part, _, kind = own.rpartition(".")
        known = names.get(part) or LAYER_NAMES.get(part)
        whole = WHOLE_NAMES.get(own) or (known and f"{known}.{kind}")
    return name if whole is None else f"model.layers.{layer}.{whole}"
