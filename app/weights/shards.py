"""The part of a decoder that one of several GPUs computes: some heads, and some columns of each MLP.

Queries, keys, values and the first product of an MLP are split by rows, the products after them by columns, whose results
the ranks add up. Embeddings, norms and the output layer are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from app.errors import PlanImpossible
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import attention_products, up_sources
from app.weights.checkpoint import Checkpoint
from app.weights.open import OpenedModel
from app.weights.safetensors import ColumnsEntry, RearrangedEntry, TensorEntry


def check_shardable(checkpoint: OpenedModel, ranks: int) -> None:
    """Raise `PlanImpossible` if a model cannot be split among so many ranks."""
    asked = f"tensor_parallel is {ranks}, but"
    config = checkpoint.model_config if isinstance(checkpoint, Checkpoint) else None
    if not isinstance(config, ModelConfig):
        raise PlanImpossible(f"{asked} only decoders that this package computes are split.")
    reasons = {
        "its mixture of experts": config.experts is not None,
        "its latent attention": config.latent is not None,
        "its short convolutions": config.convolution is not None,
        "its recurrent states": config.recurrent is not None,
        "its several streams": config.altup is not None,
        "its layers of one branch": config.placement == "single",
        "the gates of its attention": config.has_output_gate,
        "ALiBi": bool(config.alibi_slopes),
        "a norm over several heads": config.head_norm is not None and config.head_norm.scope != "shared",
        "gates that are compared with all others": bool(config.gate_deviations),
    }
    for reason, applies in reasons.items():
        if applies:
            raise PlanImpossible(f"{asked} {config.architecture} is not split yet: {reason} is not.")
    sizes = [config.num_heads, *(kind.num_kv_heads for kind in config.head_kinds), *_inner_sizes(config)]
    if undivided := next((size for size in sizes if size % ranks), None):
        raise PlanImpossible(
            f"{asked} its {config.num_heads} heads, {config.num_kv_heads} heads of keys and MLPs of {config.intermediate_size}"
            f" cannot all be divided by it ({undivided} is left over)."
        )
    if checkpoint.needs().codes_precision:
        raise PlanImpossible(f"{asked} the codes of a quantized checkpoint are not split: serve the original weights.")


def _inner_sizes(config: ModelConfig) -> Sequence[int]:
    return config.inner_sizes or (config.intermediate_size,)


def shard(checkpoint: Checkpoint, rank: int, ranks: int) -> Checkpoint:
    """Return the part of a checkpoint that a rank loads, as a checkpoint with fewer heads and narrower MLPs."""
    config = checkpoint.decoder
    tensors = dict(checkpoint.tensors)
    for layer in range(config.num_layers):
        first, out = attention_products(config, layer)
        at, inner = f"model.layers.{layer}", config.inner_size(layer)
        rows = first.rows
        if config.fused_qkv and config.writes_cache(layer):
            keys = config.heads(layer).num_kv_heads * config.heads(layer).head_dim
            segments: list[Sequence[int]] = [(rows[0] - 2 * keys, keys, keys)]
        else:
            segments = [(count,) for count in rows]
        ups = up_sources(config)
        up_segments = [(inner, inner) if config.is_gated and len(ups) == 1 else (inner,)] * len(ups)
        split = [*zip(first.sources, segments, strict=True), *zip(ups, up_segments, strict=True)]
        for source, parts in dict(split).items():
            for kind in ("weight", "bias"):
                _replace(tensors, f"{at}.{source}.{kind}", partial(_rows, segments=parts, rank=rank, ranks=ranks))
        sinks = partial(_rows, segments=(config.num_heads,), rank=rank, ranks=ranks)
        _replace(tensors, f"{at}.self_attn.sinks", sinks)
        for source in (*out.sources, "mlp.down_proj"):
            _replace(tensors, f"{at}.{source}.weight", partial(_columns, rank=rank, ranks=ranks))
            if rank:  # the results are added up, and the bias counts once
                _replace(tensors, f"{at}.{source}.bias", _zeros)
    return replace(checkpoint, model_config=shard_config(config, ranks), tensors=tensors)


def shard_config(config: ModelConfig, ranks: int) -> ModelConfig:
    full = config.full_heads
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
        inner_sizes=tuple(size // ranks for size in config.inner_sizes),
        full_heads=None if full is None else replace(full, num_kv_heads=full.num_kv_heads // ranks),
    )


def _replace(tensors: dict[str, TensorEntry], name: str, part: Callable[[TensorEntry], TensorEntry]) -> None:
    if name in tensors:
        tensors[name] = part(tensors[name])


def _rows(entry: TensorEntry, segments: Sequence[int], rank: int, ranks: int) -> TensorEntry:
    """Return a rank's part of each segment of the rows."""
    rows: list[int] = []
    begin = 0
    for size in segments:
        part = size // ranks
        rows += range(begin + rank * part, begin + (rank + 1) * part)
        begin += size
    shape = (len(rows), *entry.shape[1:])
    return RearrangedEntry(entry.file, entry.dtype, shape, entry.start, entry.end, entry, tuple(rows))


def _columns(entry: TensorEntry, rank: int, ranks: int) -> TensorEntry:
    part = entry.shape[1] // ranks
    shape = (entry.shape[0], part)
    return ColumnsEntry(entry.file, entry.dtype, shape, entry.start, entry.end, entry, rank * part)


def _zeros(entry: TensorEntry) -> TensorEntry:
    factors = ((entry.shape[0], 0.0),)
    return RearrangedEntry(entry.file, entry.dtype, entry.shape, entry.start, entry.end, entry, factors=factors)
