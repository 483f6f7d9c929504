"""Which library quantized a checkpoint, by its config.json, and the weights that its tensors hold. Torch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.files import join_names
from app.weights.quantized.bitsandbytes import join_bitsandbytes
from app.weights.quantized.compressed_tensors import join_compressed
from app.weights.quantized.entries import PackedEntry, Parts
from app.weights.quantized.fp8 import join_fp8
from app.weights.quantized.gptq import join_awq, join_gptq
from app.weights.quantized.mlx import join_mlx
from app.weights.quantized.mxfp4 import join_mxfp4
from app.weights.safetensors import TensorEntry, join_quantized

_Join = Callable[[Parts, ConfigReader], dict[str, PackedEntry]]
MLX = "mlx"
METHODS: Mapping[str, _Join] = {
    "gptq": join_gptq,
    "awq": join_awq,
    "compressed-tensors": join_compressed,
    "fp8": join_fp8,
    "fbgemm_fp8": join_fp8,
    "bitsandbytes": join_bitsandbytes,
    "mxfp4": join_mxfp4,
    MLX: join_mlx,
}
TORCHAO = "torchao"
# Ends of names that only quantized weights have.
_QUANTIZED_NAMES = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax",
    ".quant_map", ".SCB", "_blocks", "_scales",
)  # fmt: skip


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return the method that quantized the weights; empty if they are not quantized.

    Raises:
        CheckpointInvalid: The method is unknown or not supported.
    """
    quantization = _quantization(config)
    if not quantization:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is None and isinstance(quantization, dict) and {"bits", "group_size"} <= set(quantization):
        return MLX  # which has no quant_method
    if method == TORCHAO or (isinstance(method, str) and method in METHODS):
        return str(method)
    raise CheckpointInvalid(
        f"config.json: the weights are already quantized by {str(method)[:40]} (quantization_config), which is not supported."
        f" Supported are {', '.join((*METHODS, TORCHAO))}. Use the original weights, or another quantization of them."
    )


def _quantization(config: Mapping[str, Any]) -> Any:
    """Return the entry of config.json on quantization, whatever it holds. MLX calls it `quantization`."""
    return config.get("quantization_config") or config.get("quantization")


def join_weights(method: str, config: Mapping[str, Any], found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors by name, with the parts of each quantized weight joined to one entry.

    Args:
        method: What `quantization_method` returned, not empty.
        config: The values of config.json.
        found: The stored tensors.

    Raises:
        CheckpointInvalid: The configuration or the tensors are damaged or not supported.
    """
    if method == TORCHAO:
        return join_quantized(found)
    parts = Parts(found)
    reader = ConfigReader(_quantization(config), "config.json: quantization_config")
    joined = METHODS[method](parts, reader)
    both = sorted(set(joined) & set(parts.tensors))
    if both:
        raise CheckpointInvalid(f"The weights hold {both[0][:120]} twice: quantized, and as it was before.")
    return {**parts.tensors, **{name: replace(entry, name=name) for name, entry in joined.items()}}


def check_not_quantized(found: Mapping[str, TensorEntry]) -> None:
    """Check that weights whose config.json names no quantization have no tensors of one.

    Raises:
        CheckpointInvalid: They have.
    """
    names = sorted(name for name in found if name.endswith(_QUANTIZED_NAMES))
    if names:
        raise CheckpointInvalid(
            f"The weights are quantized ({join_names(names)}), and config.json does not say how: it has no quantization_config."
            " Take the config.json that was published with these weights."
        )
