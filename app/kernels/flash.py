"""Torch's own flash attention of sequences end to end, on NVIDIA GPUs: the quickest for whole prompts and texts in half precision.

It knows windows, to both sides, and fewer heads of keys than of queries; soft caps and biases it does not, and pages only of other sizes
(pytorch/pytorch#175924). Those are our kernels' (gpu/prompts.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.models.context import AttentionSpec

# query, key, value [tokens, heads or kv_heads, head_dim] with any strides but the last, cumulative lengths int32 [sequences + 1], the most
# tokens of one, no dropout, causal, no mask back; scale, window_size_left, window_size_right. The first of what it returns is the result.
# Sequences without tokens are allowed. The positional words are the same in torch 2.10 and 2.13.
_flash = torch.ops.aten._flash_attention_forward.default

_MOST_HEAD, _HEAD_MULTIPLE = 256, 8  # flash_api.cpp, mha_varlen_fwd
_HALVES = (torch.float16, torch.bfloat16)


def suits(dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> bool:
    """Whether torch's kernel takes heads like these; the GPU is of compute capability 8.0 at least, as all that are served."""
    plain = spec.softcap is None and spec.distance_bias is None
    return plain and dtype in _HALVES and head_dim <= _MOST_HEAD and head_dim % _HEAD_MULTIPLE == 0


def attend(query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, int], spec: AttentionSpec) -> Tensor:
    """What each token makes of its own sequence, [tokens, heads, head_dim]; rows of no sequence are left open.

    `ends`: where sequences begin, int32 [sequences + 1] of which the first need not be 0, and the most tokens of one.
    """
    starts, most = ends
    most = max(most, 2)  # of sequences of one token alone it makes a batch, and counts rows of no sequence into that
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
    """How many tokens before and after its own each sees; −1: all. Causal without a window is said in another word."""
    if spec.bidirectional:
        both = -1 if spec.window is None else spec.window // 2
        return both, both
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)
