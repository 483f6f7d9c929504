"""The inputs of attention over a ragged batch: a layer's QKV product, its cached rows, and the sequences of a step.

- `QkvHeads` holds a QKV product with its head layout and the norms and RoPE angles that its heads need; `elementwise/rope.py` applies them.
- `KvRows` are the keys and values of one layer as rows, one per token, in bf16, fp32 or int8. `csrc/ops.h`, "Keys and
  values", describes the rows. The KV cache decides which row belongs to which sequence.
- `AttentionStep` describes the sequences, whose contexts have one or two segments, for the native kernels (`ragged.py`).
  `flash.py` has the reference implementation, and torch's attention where these kernels do not apply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature_kernels.native.arguments import AttentionArguments, KvAddresses, OpCode
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import Int64Buffer, aligned_bytes
from armature_kernels.native.operations import has_kernel

_ROW_ALIGNMENT = 64  # an int8 row is padded to a multiple of this many bytes


@dataclass(frozen=True, slots=True)
class KvRows:
    """Keys and values [rows, kv_heads, head_dim] of one layer, as views of rows of `token_bytes` bytes.

    int8 codes have scales fp32 [rows, kv_heads] in the same row.
    """

    keys: Tensor
    values: Tensor
    token_bytes: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [tokens, kv_heads, head_dim], of any strides, at `rows` [tokens] int64.

        A token's stored values do not depend on the rest of the batch.
        """
        for target, scales, given in ((self.keys, self.key_scales, key), (self.values, self.value_scales, value)):
            if scales is None:
                target.index_copy_(0, rows, given.to(target.dtype))
            else:
                codes, own = quantize_heads(given)
                target.index_copy_(0, rows, codes)
                scales.index_copy_(0, rows, own)

    def read(self, first: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows `[first, first + num_tokens)`: views, or dequantized int8 in bfloat16."""
        key, value = self.keys.narrow(0, first, num_tokens), self.values.narrow(0, first, num_tokens)
        if self.key_scales is None or self.value_scales is None:
            return key, value
        scales = self.key_scales.narrow(0, first, num_tokens), self.value_scales.narrow(0, first, num_tokens)
        return (key * scales[0][..., None]).to(torch.bfloat16), (value * scales[1][..., None]).to(torch.bfloat16)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows int64 of any shape: as stored, or dequantized in FP32."""
        key, value = self.keys[rows], self.values[rows]
        if self.key_scales is None or self.value_scales is None:
            return key, value
        return key * self.key_scales[rows][..., None], value * self.value_scales[rows][..., None]

    def heads_of(self, asked: QkvHeads) -> KvRows:
        """Return a view of the rows as the heads that a layer writes, or reads if it writes none: the first elements."""
        heads, size = asked.num_kv_heads or asked.read_heads or self.keys.shape[1], asked.head_dim
        if self.keys.shape[1:] == (heads, size):
            return self
        keys, values = (
            part.flatten(1)[:, : heads * size].view(len(part), heads, size) for part in (self.keys, self.values)
        )
        scales = (None if part is None else part[:, :heads] for part in (self.key_scales, self.value_scales))
        return KvRows(keys, values, self.token_bytes, *scales)

    def addresses(self) -> KvAddresses:
        """Return the addresses as the C structure `view_kv_rows`."""
        scales = [None if scale is None else scale.data_ptr() for scale in (self.key_scales, self.value_scales)]
        return KvAddresses(self.keys.data_ptr(), self.values.data_ptr(), *scales, self.token_bytes)


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token in one layer."""
    elements = 2 * kv_heads * head_dim
    if dtype != torch.int8:
        return elements * dtype.itemsize
    return -(-(elements + 2 * kv_heads * 4) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def view_kv_rows(memory: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvRows:
    """View memory uint8 [rows, token_bytes] of one layer as keys and values."""
    rows, size = memory.shape
    elements = kv_heads * head_dim * dtype.itemsize
    key, value = (
        memory[:, at * elements : (at + 1) * elements].view(dtype).view(rows, kv_heads, head_dim) for at in (0, 1)
    )
    if dtype != torch.int8:
        return KvRows(key, value, size)
    scales = memory[:, 2 * elements : 2 * elements + 8 * kv_heads].view(torch.float32)
    return KvRows(key, value, size, scales[:, :kv_heads], scales[:, kv_heads:])


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [tokens, heads, head_dim] to codes int8 and scales fp32 [tokens, heads].

    The scale of a head that is not finite is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    used = finite & (largest > 1e-35)
    # A tensor, because torch divides a Python number by a tensor through the reciprocal, which rounds twice.
    hundred = torch.full_like(largest, 127.0)
    inverse = torch.where(used, torch.div(hundred, largest), 0.0)
    codes = torch.where(used[..., None], x * inverse[..., None], 0.0).round().to(torch.int8)
    return codes, torch.where(used, torch.div(largest, hundred), torch.where(finite, 0.0, torch.nan))


RopeAngles = tuple[Tensor, Tensor]  # cos and signed sin, each [tokens, 1, dim], fp32


@dataclass(frozen=True, slots=True)
class QkvHeads:
    """A layer's QKV product, [tokens, (num_heads + 2 * num_kv_heads) * head_dim], and the transforms its heads need.

    Queries and keys have a norm each and RoPE angles, if the model has them. The norm is an RMSNorm, or a LayerNorm if it
    `subtracts_mean`. Its weights fp32 are [head_dim], or [heads * head_dim], or with `norm_bias` [2 * head_dim], of which the second
    half is added. `together`: the statistics are those of all
    heads of a token instead of each one's. `value_norm` [head_dim]: values have an RMSNorm of single heads. `num_kv_heads` 0:
    there are queries alone, which attend to the keys and values of `read_heads` heads that an earlier layer wrote.
    """

    product: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0
    angles: RopeAngles | None = None
    subtracts_mean: bool = False
    norm_bias: bool = False
    together: bool = False
    norm_after_rope: bool = False
    value_norm: Tensor | None = None
    read_heads: int = 0

    @property
    def has_plain_norm(self) -> bool:
        """True if queries and keys have an RMSNorm of single heads with shared weights before RoPE, or no norm."""
        shared = self.query_norm is None or self.query_norm.numel() == self.head_dim
        return shared and not (self.subtracts_mean or self.norm_bias or self.together or self.norm_after_rope)

    @property
    def is_final(self) -> bool:
        """True if heads need no norm and no RoPE before attention."""
        return all(one is None for one in (self.query_norm, self.key_norm, self.value_norm, self.angles))

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the product: queries, keys and values, [tokens, heads, head_dim] each."""
        product = self.product.view(len(self.product), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = product.tensor_split((self.num_heads, self.num_heads + self.num_kv_heads), 1)
        return query, key, value


_MAX_HEAD_DIM, _MAX_QUERIES_PER_KV_HEAD = 512, 32  # csrc/attention.h
# `is_decode` in csrc/attention.h: with fewer rows, a KV head's queries read the context without repacking.
_PROMPT_ROWS = 32
_NO_SEGMENT = (0, 0, 0)
_HEADER_FIELDS, _SEQUENCE_FIELDS = 2, 10  # int64 values in `attention_step` and `sequence` of csrc/ops.h


@dataclass(frozen=True, slots=True)
class KvSegment:
    """Tokens `[first, first + num_tokens)` of a layer's flat KV rows.

    `position` is the absolute position of the first token in its sequence.
    """

    first: int
    num_tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class AttentionSequence:
    """One sequence of a ragged batch, with its queries and its context.

    The queries are rows `[first, first + num_tokens)` of the batch, at absolute positions from `start`. The
    context is one or two segments that together cover positions `[0, start + num_tokens)`, including this step's
    tokens.
    """

    first: int
    num_tokens: int
    start: int
    runs: tuple[KvSegment, ...]


class AttentionStep:
    """The sequences of one step and their contexts, the same for every layer (`attention_step` in csrc/ops.h).

    The int64 buffer keeps its address as long as its capacity suffices, so recorded operations that run again read
    the new step there.
    """

    def __init__(self, num_sequences: int = 64) -> None:
        """Allocate a buffer for `num_sequences`; a step with more sequences gets a buffer at another address."""
        self.rows: Sequence[AttentionSequence] = ()
        self._buffer = Int64Buffer(_HEADER_FIELDS + num_sequences * _SEQUENCE_FIELDS)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # Layers by their numbers of heads, known after the first step.
        self._heads: dict[tuple[int, int, int, bool], AttentionArguments] = {}

    @property
    def address(self) -> int:
        """Address of the C structure `attention_step`."""
        return self._buffer.address

    def fill(self, rows: Sequence[AttentionSequence]) -> None:
        """Describe the next step."""
        self.rows = rows
        fields = [len(rows), self._scratch.data_ptr()]
        for row in rows:
            fields += (row.first, row.num_tokens, row.start, len(row.runs))
            for part in row.runs:
                fields += (part.first, part.num_tokens, part.position)
            if len(row.runs) == 1:
                fields += _NO_SEGMENT
        self._buffer.fill(fields)
        for asked in self._heads.values():
            self._reserve(asked)

    @property
    def is_replayable(self) -> bool:
        """Return True if the next step can replay this step's recorded operations.

        This requires that the native kernel computed attention and that the buffer stays at the same address.
        """
        # The first step allocates the scratch memory.
        return bool(self._heads) and self._buffer.stays

    def set_heads(self, heads: int, kv_heads: int, head_dim: int, wide: bool) -> None:
        """Set the numbers of heads, which are fp32 if `wide`; scratch memory is allocated now and for later steps."""
        sizes = (heads, kv_heads, head_dim, wide)
        if sizes not in self._heads:
            self._heads[sizes] = AttentionArguments(heads=heads, kv_heads=kv_heads, head_dim=head_dim, wide=wide)
            self._reserve(self._heads[sizes])

    def _reserve(self, asked: AttentionArguments) -> None:
        library = native_library().library
        assert library is not None, "attention runs in the native library"
        asked.step = self.address
        needed = int(library.armature_attention_scratch(ctypes.byref(asked)))
        if needed > self._scratch.numel():
            self._scratch = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            self._scratch = aligned_bytes(needed)
            self._buffer.set(1, self._scratch.data_ptr())


def supports_attention(query: Tensor, kv: KvRows) -> bool:
    """Return True if the native kernels support this query [tokens, heads, head_dim] with these keys and values."""
    _, heads, head_dim = query.shape
    plain = query.stride(2) == 1 and query.stride(1) == head_dim
    return plain and supports_kv(query.dtype, kv) and supports_heads(heads, kv.keys.shape[1], head_dim)


def supports_kv(dtype: torch.dtype, kv: KvRows) -> bool:
    """Return True if the native kernels support these keys and values with queries of this dtype."""
    if dtype == torch.float32:
        return kv.keys.dtype == torch.float32
    return dtype == torch.bfloat16 and kv.keys.dtype in (torch.bfloat16, torch.int8)


def supports_heads(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return True if the library has the attention kernel and it supports these numbers and sizes of heads."""
    return (
        heads // kv_heads <= _MAX_QUERIES_PER_KV_HEAD
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
        and has_kernel(OpCode.ATTENTION)
    )


def max_decode_queries(heads: int, kv_heads: int) -> int:
    """Return the most queries of one sequence that the decode kernel handles.

    More queries use the prompt kernel, which sums in another order.
    """
    return max(1, (_PROMPT_ROWS - 1) // (heads // kv_heads))


def split_into_decodes(
    rows: Sequence[AttentionSequence], max_queries: int, part_rows: int
) -> list[tuple[slice, list[AttentionSequence]]]:
    """Split the batch into sequences of at most `max_queries` queries, in parts of about `part_rows` rows.

    The parts bound the scratch memory. A batch with one query per sequence is one part.

    Returns:
        For each part, the rows of the batch that it covers, and its sequences with `first` relative to the part.
    """
    if all(row.num_tokens == 1 for row in rows):
        return [(slice(0, len(rows)), list(rows))]
    parts: list[tuple[slice, list[AttentionSequence]]] = []
    for row in rows:
        for at in range(0, row.num_tokens, max_queries):
            first, count = row.first + at, min(max_queries, row.num_tokens - at)
            if not parts or first - parts[-1][0].start >= part_rows:
                parts.append((slice(first, first), []))
            begin = parts[-1][0].start
            parts[-1][1].append(
                AttentionSequence(
                    first - begin, count, row.start + at, clip_segments(row.runs, 0, row.start + at + count)
                )
            )
            parts[-1] = (slice(begin, first + count), parts[-1][1])
    return parts


def clip_segments(runs: Sequence[KvSegment], start: int, end: int) -> tuple[KvSegment, ...]:
    """Return the parts of `runs` at positions `[start, end)`."""
    cut = [(run, max(start, run.position), min(end, run.position + run.num_tokens)) for run in runs]
    return tuple(KvSegment(run.first + low - run.position, high - low, low) for run, low, high in cut if low < high)


def head_addresses(heads: int, *vectors: Tensor | None) -> tuple[int | None, ...]:
    """Return the addresses of vectors fp32 [heads]; None for those that are not given."""
    for vector in vectors:
        assert vector is None or (
            vector.shape == (heads,) and vector.dtype == torch.float32 and vector.is_contiguous()
        ), "each head has one fp32 number"
    return tuple(None if vector is None else vector.data_ptr() for vector in vectors)


_MAX_HEAD_DIM = 512  # csrc/turn.h
