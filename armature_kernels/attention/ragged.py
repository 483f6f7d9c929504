"""Causal attention of a ragged batch over a KV cache, by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from armature_kernels.attention.attention import AttentionStep, KvRows, head_addresses
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.native.arguments import AttentionArguments, OpCode
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import run_operation


def attend(query: Tensor, kv: KvRows, step: AttentionStep, spec: AttentionSpec) -> Tensor:
    """Compute causal attention of query [tokens, heads, head_dim]; the result is a new contiguous tensor.

    It has the query's shape and dtype. Rows that belong to no sequence of the step are not initialised. A recorded
    operation keeps the addresses of the vectors in `spec`.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    wide = query.dtype == torch.float32
    step.set_heads(heads, kv_heads, head_dim, wide)
    out = empty((tokens, heads, head_dim), query.dtype)
    addresses = (query.data_ptr(), out.data_ptr(), step.address, kv.addresses())
    sizes = (query.stride(0), heads * head_dim, heads, kv_heads, head_dim, spec.window or 0, wide)
    vectors = head_addresses(heads, spec.sinks, spec.slopes)
    run_operation(AttentionArguments(*addresses, *sizes, spec.scale, spec.softcap or 0.0, *vectors), OpCode.ATTENTION)
    return out
