"""One token of each sequence through a recurrent state on a GPU: the gated delta rule and Mamba-2.

A program has a head of a sequence and 32 columns of its state, which lie together: it reads them once and writes them once,
to another row. The columns do not depend on each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.attention.recurrent_sizes import STATE_COLUMNS, RecurrentSizes
from armature_kernels.triton.launch import launch_options, wait_for_inputs


def advance_by_token(
    mixed: Tensor, scales: tuple[Tensor, Tensor], states: Tensor, rows: tuple[Tensor, Tensor], sizes: RecurrentSizes
) -> Tensor:
    """Return the results fp32 [sequences, heads, value_size] of one token of each sequence, and write the states after them.

    Args:
        mixed: The convolution's result after its activation, fp32 [sequences, channels].
        scales: Logarithms of the decays and factors of the values, fp32 [sequences, heads].
        states: fp32 [rows, state_elements] of the layer.
        rows: Where the states are read and written, int64 [sequences].
        sizes: The heads.
    """
    out = torch.empty(len(mixed), sizes.heads, sizes.value_size, dtype=torch.float32, device=mixed.device)
    logs, factors = (one.contiguous() for one in scales)
    blocks = -(-sizes.value_size // STATE_COLUMNS)
    shared, width = sizes.heads // sizes.key_heads, triton.next_power_of_2(sizes.key_size)
    if len(mixed):
        _advance_by_token[(len(mixed), sizes.heads, blocks)](
            mixed, logs, factors, states, *rows, out, mixed.stride(0), states.stride(0), sizes.tail_elements, *sizes.places,
            sizes.heads, shared, sizes.key_size, sizes.value_size, width, STATE_COLUMNS, sizes.has_delta, num_warps=4,
            **launch_options(),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["reads", "writes"])  # views of a step's buffer have any alignment
def _advance_by_token(
    mixed, logs, factors, states, reads, writes, out, stride, state_stride, first, query_place, key_place, value_place,
    heads: tl.constexpr, shared: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr,
    width: tl.constexpr, columns: tl.constexpr, has_delta: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    sequence, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys, own = tl.arange(0, width), tl.arange(0, columns)
    values, row = block * columns + own, mixed + sequence * stride
    in_key, in_value = keys < key_size, values < value_size
    query = tl.load(row + query_place + head // shared * key_size + keys, in_key, 0.0)
    key = tl.load(row + key_place + head // shared * key_size + keys, in_key, 0.0)
    value = tl.load(row + value_place + head * value_size + values, in_value, 0.0)
    if has_delta:
        query = query * tl.rsqrt(tl.sum(query * query) + 1e-6) * tl.rsqrt(key_size * 1.0)
        key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
    blocks: tl.constexpr = (value_size + columns - 1) // columns
    places = first + ((head * blocks + block) * key_size + keys[:, None]) * columns + own[None, :]
    decay = tl.exp(tl.load(logs + sequence * heads + head))
    matrix = tl.load(states + tl.load(reads + sequence) * state_stride + places, in_key[:, None], 0.0) * decay
    if has_delta:
        value -= tl.sum(key[:, None] * matrix, 0)
    value *= tl.load(factors + sequence * heads + head)
    matrix += key[:, None] * value[None, :]
    tl.store(states + tl.load(writes + sequence) * state_stride + places, matrix, in_key[:, None])
    tl.store(out + (sequence * heads + head) * value_size + values, tl.sum(query[:, None] * matrix, 0), in_value)
