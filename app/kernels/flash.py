"""Torch's flash attention over packed sequences on NVIDIA GPUs, for half precision.

It is the fastest for whole prompts and texts. It supports windows to both sides and fewer KV heads than query
heads. It does not support soft caps, biases, or KV pages of our size (pytorch/pytorch#175924). The Triton prompt
kernels handle those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.models.context import AttentionSpec

# Arguments: query, key, value [tokens, heads or kv_heads, head_dim] with any strides but the last; cumulative
# lengths int32 [sequences + 1]; most tokens of one sequence; dropout; causal; return_debug_mask; scale;
# window_size_left; window_size_right. The first output is the result. Empty sequences are allowed. The
# positional arguments are the same in torch 2.10 and 2.13.
_flash = torch.ops.aten._flash_attention_forward.default

_MOST_HEAD, _HEAD_MULTIPLE = 256, 8  # flash_api.cpp, mha_varlen_fwd
_HALVES = (torch.float16, torch.bfloat16)


def suits(dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> bool:
    """Return True if torch's kernel supports this dtype, head size and attention.

    The GPU has at least compute capability 8.0, like all supported GPUs.
    """
    plain = spec.softcap is None and spec.distance_bias is None
    return plain and dtype in _HALVES and head_dim <= _MOST_HEAD and head_dim % _HEAD_MULTIPLE == 0


def attend(query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, int], spec: AttentionSpec) -> Tensor:
    """Compute attention within each sequence and return [tokens, heads, head_dim].

    `ends` contains the sequence starts, int32 [sequences + 1], of which the first need not be 0, and the most
    tokens of one sequence. Rows that belong to no sequence are not initialised.
    """
    starts, most = ends
    most = max(most, 2)  # a maximum of 1 makes the kernel reshape to a batch that includes rows of no sequence
    left, right = _window(spec)
    causal = not spec.bidirectional and spec.window is None
    result: Tensor = _flash(
        query,
        key,
        value,
        starts,
        starts,
        most,
        most,
        0.0,
        causal,
        False,
        scale=spec.scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return result


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return the numbers of tokens before and after its position that a token sees; -1 means all.

    Causal attention without a window uses the kernel's `causal` argument instead.
    """
    if spec.bidirectional:
        both = -1 if spec.window is None else spec.window // 2
        return both, both
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)
