"""Maps the tensors of a GGUF file to the names and shapes of a Hugging Face checkpoint. Torch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.weights.gguf.config import EXPERT_NAMES, ROPE_DIVISORS, ROPE_FACTORS, WHOLE_NAMES, GgufFamily, expert_tensors
from app.weights.gguf.reader import TYPES, GgufModel, GgufTensor
from app.weights.safetensors import EncodedEntry, TensorEntry

OTHER_NAMES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
NAMES: Mapping[str, Mapping[str, str]] = {
    **_FAMILY_NAMES,
    "gemma3_text": {**_FAMILY_NAMES["qwen3"], **_FAMILY_NAMES["gemma2"]},
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

    `kind` is the type in the file. With `heads`, row 2i + j of a head in the file is row i + j · (half a head) here.
    `added` was added to each value in the file.
    """

    kind: str
    heads: int = 0
    added: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row; of a vector, of one value."""
        return (self.end - self.start) // self.shape[0]

    def stored_row(self, row: int) -> int:
        if not self.heads:
            return row
        size = self.shape[0] // self.heads
        head, within = divmod(row, size)
        pair, half = within % (size // 2), within // (size // 2)
        return head * size + 2 * pair + half


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
        experts = dict(expert_tensors(name, tensor, config["num_local_experts"])) if family.has_experts else {}
        found.update((ours, gguf_entry(own)) for ours, own in experts.items())
        if experts:
            continue
        part = name.split(".")[-2] if name.count(".") > 1 else ""
        added = 1.0 if family.is_gemma and name.endswith("_norm.weight") else 0.0
        found[_name_here(name, family.model_type)] = gguf_entry(tensor, heads.get(part, 0), added)
    return found


def _predicts_further(name: str, config: Mapping[str, Any]) -> bool:
    layer, num_layers = name.removeprefix("blk.").partition(".")[0], config["num_hidden_layers"]
    return layer.isdecimal() and num_layers <= int(layer) < num_layers + config["num_nextn_predict_layers"]


def gguf_entry(tensor: GgufTensor, heads: int = 0, added: float = 0.0) -> TensorEntry:
    place = tensor.file, tensor.shape, tensor.start, tensor.end
    if heads and (tensor.shape[0] % (2 * heads) or len(tensor.shape) > 2):
        heads = 0  # the shape is wrong and is refused later, by name
    if not TYPES[tensor.kind].is_quantized:
        if not heads and not added:
            return TensorEntry(tensor.file, tensor.kind, *place[1:])
        return BlockEntry(tensor.file, tensor.kind, *place[1:], kind=tensor.kind, heads=heads, added=added)
    return BlockEntry(tensor.file, "F32", *place[1:], kind=tensor.kind, heads=heads, added=added)


def _name_here(name: str, model_type: str) -> str:
    """Return the checkpoint's name: `blk.3.ffn_up.weight` becomes `model.layers.3.mlp.up_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{kind}"
    start, _, part = stem.rpartition(".")
    layer = start.removeprefix("blk.")
    known = NAMES.get(model_type, {}).get(part) or LAYER_NAMES.get(part)
    whole = WHOLE_NAMES.get(f"{part}.{kind}") or (known and f"{known}.{kind}")
    return name if whole is None or not layer.isdecimal() else f"model.layers.{layer}.{whole}"
