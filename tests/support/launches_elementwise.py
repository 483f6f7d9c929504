"""Launches of the elementwise kernels as in serving, which tests/parity/gpu/test_compiles.py compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from armature_kernels.attention.attention import QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.recurrent_sizes import RecurrentSizes
from armature_kernels.triton import elementwise, recurrence, rope

TOKENS = 3
BF16 = torch.bfloat16


def launch_norms() -> None:
    hidden, weight = torch.zeros(TOKENS, 2048), torch.zeros(2048)
    elementwise.rms_norm(hidden, weight, 1e-5, BF16)
    elementwise.add_rms_norm(hidden, hidden.to(BF16), weight, 1e-5)


def launch_longest_norm() -> None:
    elementwise.rms_norm(
        torch.zeros(TOKENS, elementwise.MAX_ROW_SIZE), torch.zeros(elementwise.MAX_ROW_SIZE), 1e-5, BF16
    )


def launch_layer_norms() -> None:
    hidden, weight = torch.zeros(TOKENS, 384), torch.zeros(384)
    elementwise.layer_norm(hidden, (weight, weight, 1e-5), BF16, True)
    elementwise.layer_norm(hidden, (weight, None, 1e-5), None, True)


def launch_gates() -> None:
    gate_up = torch.zeros(TOKENS, 2 * 8192, dtype=BF16)
    elementwise.gate(gate_up, "silu")
    for activation in ("gelu", "gelu_tanh", "relu", "relu2", "tanh"):
        elementwise.activate(gate_up, activation)


def launch_rows() -> None:
    table, ids = torch.zeros(10, 2048, dtype=BF16), torch.zeros(TOKENS, dtype=torch.int64)
    elementwise.embedding_rows(table, ids, torch.ones(2048))
    elementwise.add_embedding_rows(torch.zeros(TOKENS, 2048), table, ids, 1.0)


def launch_states() -> None:
    rows, scales = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, 16)
    for has_delta in (True, False):
        sizes = RecurrentSizes(16, 16, 128, 128, 4, has_delta)
        states = torch.zeros(4, sizes.state_elements)
        recurrence.advance_by_token(torch.zeros(TOKENS, sizes.channels), (scales, scales), states, (rows, rows), sizes)


def launch_angles() -> None:
    rope.rope_angles(torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(64), 1.0)


def launch_turning() -> None:
    for head_dim, dim, normed in ((128, 128, True), (80, 32, False), (64, 0, False)):
        _turn(head_dim, dim, normed)


def _turn(head_dim: int, dim: int, normed: bool) -> None:
    product, angle = torch.zeros(TOKENS, (32 + 2 * 8) * head_dim, dtype=BF16), torch.zeros(TOKENS, 1, dim)
    weights: tuple[Tensor | None, ...] = (torch.zeros(head_dim),) * 2 if normed else (None, None)
    heads = QkvHeads(product, 32, 8, head_dim, *weights, 1e-5, (angle, angle) if dim else None)
    kv = view_kv_rows(torch.zeros(64, token_bytes(8, head_dim, BF16), dtype=torch.uint8), 8, head_dim, BF16)
    rope.apply_rope_and_write_kv(heads, kv, torch.zeros(TOKENS, dtype=torch.int64))
    if dim == head_dim:
        rope.apply_rope(heads)
