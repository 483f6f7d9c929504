"""Attention within packed texts, without a KV cache: native, plain torch, and torch's flash attention on NVIDIA GPUs.

Keys and values are read directly from the QKV product. `attend_texts_torch` is the reference implementation, which
processes text by text; it serves where the native kernel does not apply. Flash attention, for half precision, is the
fastest for whole prompts and texts. It supports windows to both sides and fewer KV heads than query heads, but no soft
caps, biases, or KV pages of our size (pytorch/pytorch#175924). The Triton prompt kernels handle those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as attention_backends

from armature_kernels.attention.attention import KvRows, QkvHeads, head_addresses
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.weights import attention_weights
from armature_kernels.elementwise.rope import apply_rope_and_write_kv, apply_rope_to_qkv_torch
from armature_kernels.native.arguments import OpCode, TextAttentionArguments
from armature_kernels.native.memory import Int64Buffer, empty
from armature_kernels.native.operations import has_kernel, run_operation

_LOG = logging.getLogger(__name__)
_MAX_HEAD_DIM, _MAX_QUERIES_PER_KV_HEAD = 512, 64  # csrc/texts.h
_UNBOUNDED = 2**40  # more than any text has


class TextStarts:
    """The starts of the texts of a batch, the same for every layer.

    The int64 buffer keeps its address as long as its capacity suffices, so recorded operations that run again read
    the new batch there.
    """

    def __init__(self, max_tokens: int, max_texts: int = 1024) -> None:
        """Allocate a buffer for `max_texts`; a batch with more texts gets a buffer at another address.

        `max_tokens` is the limit for all texts of a batch together.
        """
        self.starts: tuple[int, ...] = (0,)
        # RoPE is applied in place: token i's keys and values are row i of the product.
        self.rows = torch.arange(max_tokens)
        self._buffer = Int64Buffer(2 + max_texts)

    @property
    def address(self) -> int:
        """Address of the C structure that describes the batch."""
        return self._buffer.address

    @property
    def stays(self) -> bool:
        """True if this batch is stored in the fixed buffer."""
        return self._buffer.stays

    def fill(self, starts: Sequence[int]) -> None:
        """Describe the next batch: text i is tokens [starts[i], starts[i + 1]), starts[0] == 0."""
        self.starts = tuple(starts)
        self._buffer.fill([len(starts) - 1, *starts])


def attend_texts(heads: QkvHeads, texts: TextStarts, spec: AttentionSpec) -> Tensor:
    """Compute attention within each text, [tokens, num_heads * head_dim] of the product's dtype.

    The product may be overwritten.
    """
    if not supports_texts(heads):
        return attend_texts_torch(heads, texts.starts, spec)
    _apply_rope_in_place(heads, texts)
    product, size = heads.product, heads.head_dim
    tokens, queries, keys = len(product), heads.num_heads * size, heads.num_kv_heads * size
    out = empty((tokens, queries), product.dtype)
    columns = (product.data_ptr() + at * product.itemsize for at in (0, queries, queries + keys))
    bias, most, (before, after) = spec.distance_bias, 0, spec.visible_window(_UNBOUNDED)
    if bias is not None:
        assert bias.is_contiguous() and bias.dtype == torch.float32 and bias.shape[0] == heads.num_heads, (
            "the bias must be fp32 with one row per head"
        )
        most = bias.shape[1] // 2
    addresses = (*columns, out.data_ptr(), texts.address, None if bias is None else bias.data_ptr())
    sizes = (product.stride(0), queries, heads.num_heads, heads.num_kv_heads, size, before, after, most)
    wide = product.dtype == torch.float32
    vectors = head_addresses(heads.num_heads, spec.sinks, spec.slopes)
    run_operation(
        TextAttentionArguments(*addresses, *sizes, wide, spec.scale, spec.softcap or 0.0, *vectors),
    )
    return out


def supports_texts(heads: QkvHeads) -> bool:
    """Return True if the native kernel supports this product: bf16 or fp32, with supported head sizes."""
    product = heads.product
    plain = product.dtype in (torch.bfloat16, torch.float32) and product.stride(1) == 1 and product.device.type == "cpu"
    group = heads.num_heads // heads.num_kv_heads
    return (
        plain
        and heads.head_dim % 2 == 0
        and heads.head_dim <= _MAX_HEAD_DIM
        and group <= _MAX_QUERIES_PER_KV_HEAD
        and has_kernel(OpCode.TEXT_ATTENTION)
    )


def _apply_rope_in_place(heads: QkvHeads, texts: TextStarts) -> None:
    """Apply norms and RoPE to the heads in place, by treating the product's rows as the KV cache."""
    if heads.angles is None and heads.query_norm is None and heads.key_norm is None:
        return
    queries, keys = (number * heads.head_dim for number in (heads.num_heads, heads.num_kv_heads))
    product, tokens = heads.product, len(heads.product)
    key, value = (
        product[:, at : at + keys].view(tokens, heads.num_kv_heads, heads.head_dim) for at in (queries, queries + keys)
    )
    apply_rope_and_write_kv(heads, KvRows(key, value, product.stride(0) * product.itemsize), texts.rows[:tokens])


def attend_texts_torch(heads: QkvHeads, starts: Sequence[int], spec: AttentionSpec) -> Tensor:
    """Compute attention within each text by torch (reference implementation).

    Torch's attention computes plain scores, in the product's dtype. Others are computed in FP32.
    """
    query, key, value = apply_rope_to_qkv_torch(heads)
    out = query.new_empty(query.shape)
    for first, last in pairwise(starts):
        queries, keys, values = (x[first:last].transpose(0, 1) for x in (query, key, value))
        out[first:last] = _attend_text(queries, keys, values, spec).transpose(0, 1)
    return out.flatten(1)


def _attend_text(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute attention of one text: query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]."""
    group, at = len(query) // len(key), torch.arange(query.shape[1])
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    ahead, (low, high) = at - at[:, None], spec.visible_window(len(at))
    seen = (ahead >= -low) & (ahead <= high)
    if spec.has_plain_scores:
        mask = None if bool(seen.all()) else torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=spec.scale)[0]
    scores = query.float() @ key.float().transpose(1, 2) * spec.scale
    return (attention_weights(scores, ahead, seen, spec) @ value.float()).to(query.dtype)


# Arguments: query, key, value [tokens, heads or kv_heads, head_dim] with any strides but the last; cumulative
# lengths int32 [sequences + 1]; most tokens of one sequence; dropout; causal; return_debug_mask; scale;
# window_size_left; window_size_right. The first output is the result. Empty sequences are allowed. The
# positional arguments are the same in torch 2.10 and 2.13.
_flash = torch.ops.aten._flash_attention_forward.default

_MAX_TORCH_FLASH_HEAD_DIM, _HEAD_MULTIPLE = 256, 8  # flash_api.cpp, mha_varlen_fwd
_HALF_DTYPES = (torch.float16, torch.bfloat16)


_FLASH_3 = "flash_attn_interface"  # the module of FlashAttention 3, which torch can call in place of its own
_TRIAL_ENDS = (0, 2048, 2148)  # of its trial's prompts


def use_flash_3_if_faster(device: torch.device, synchronize: Callable[[], None]) -> None:
    """Let FlashAttention 3 compute torch's flash attention, if it is installed, and equal and faster on this device.

    The operator stays the same. cuDNN has no such choice: torch 2.13 builds a plan at each call of packed sequences.
    """
    if find_spec(_FLASH_3) is None:
        return
    own, seconds = _flash_trial(device, synchronize)
    faster = seconds
    try:
        attention_backends.activate_flash_attention_impl("FA3")
        other, faster = _flash_trial(device, synchronize)
        why = "" if torch.allclose(own, other, rtol=2**-6, atol=2**-6) else "its result differs"
    except (ImportError, OSError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
    if not why and faster >= seconds:
        why = "it is not faster"
    if why:
        attention_backends.restore_flash_attention_impl(_raise_warn=False)
    times = (1e6 * seconds, 1e6 * faster)
    used = f"not used ({why})" if why else "used"
    _LOG.info("prompts' attention: torch's own takes %.0f µs, FlashAttention 3 %.0f µs: %s", *times, used)


def _flash_trial(device: torch.device, synchronize: Callable[[], None]) -> tuple[Tensor, float]:
    """Return the attention of two prompts in BF16, 32 heads and 8 KV heads of 128 elements, and its least seconds."""
    ends = torch.tensor(_TRIAL_ENDS, dtype=torch.int32, device=device)
    source = torch.Generator(device).manual_seed(0)
    heads = torch.randn(_TRIAL_ENDS[-1], 48, 128, generator=source, device=device).to(torch.bfloat16)
    query, key, value = heads[:, :32], heads[:, 32:40], heads[:, 40:]
    seconds = []
    for _ in range(5):
        synchronize()
        began = time.perf_counter()
        result = torch_flash_attention(query, key, value, (ends, _TRIAL_ENDS[1]), AttentionSpec(128**-0.5))
        synchronize()
        seconds.append(time.perf_counter() - began)
    return result, min(seconds)


def torch_flash_supports(dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> bool:
    """Return True if torch's kernel supports this dtype, head size and attention.

    The GPU has at least compute capability 8.0, like all supported GPUs.
    """
    return (
        spec.has_plain_scores
        and dtype in _HALF_DTYPES
        and head_dim <= _MAX_TORCH_FLASH_HEAD_DIM
        and head_dim % _HEAD_MULTIPLE == 0
    )


def torch_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, int], spec: AttentionSpec
) -> Tensor:
    """Compute attention within each sequence and return [tokens, heads, head_dim].

    `ends` contains the sequence starts, int32 [sequences + 1], of which the first need not be 0, and the most
    tokens of one sequence. Rows that belong to no sequence are not initialised.
    """
    starts, most = ends
    most = max(most, 2)  # a maximum of 1 makes the kernel reshape to a batch that includes rows of no sequence
    left, right = spec.visible_window(-1)  # -1 means all
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
        window_size_right=-1 if causal else right,
    )[0]
    return result
