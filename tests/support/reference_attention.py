"""The simplest `Attend` there is, for one sequence: all keys and values, the mask as its definition reads, an FP32 softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext
from armature_kernels.attention.convolution import convolve_torch
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs, StateRun, recur_torch
from armature_kernels.elementwise.rope import apply_rope_to_qkv_torch


class PlainAttend:
    """Keeps all keys and values of one sequence, layer by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        self.lengths: dict[int, int] = {}

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = apply_rope_to_qkv_torch(heads)
        if heads.num_kv_heads:  # else an earlier layer wrote them
            none = key.new_zeros(0, *key.shape[1:])
            self.keys[layer] = torch.cat((self.keys.get(layer, none), key))
            self.values[layer] = torch.cat((self.values.get(layer, none), value))
        group = query.shape[1] // self.keys[layer].shape[1]
        keys, values = (held[layer].float().repeat_interleave(group, 1) for held in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        at = torch.arange(keys.shape[0])
        mine = at[-query.shape[0] :, None]
        if spec.slopes is not None:
            scores = scores - spec.slopes[:, None, None] * (mine - at)
        visible = at <= mine if spec.window is None else (at <= mine) & (at > mine - spec.window)
        scores = scores.masked_fill(~visible, -torch.inf)
        if spec.sinks is not None:
            scores = torch.cat((spec.sinks[:, None, None].expand(*scores.shape[:2], 1), scores), -1)
        weights = scores.softmax(-1)[..., -len(at) :]
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype).flatten(1)

    def recur(self, layer: int, inputs: RecurrentInputs, recurrence: Recurrence) -> Tensor:
        state = self.states.setdefault(layer, torch.empty(1, recurrence.sizes.state_elements))
        return recur_torch(inputs, recurrence, state, [self._run(layer, len(inputs.steps))])

    def convolve(self, layer: int, x: Tensor, filters: Tensor) -> Tensor:
        state = self.states.setdefault(layer, torch.empty(1, len(filters) * filters.shape[1]))
        return convolve_torch(x, filters, state, [self._run(layer, len(x))])

    def _run(self, layer: int, num_tokens: int) -> StateRun:
        start = self.lengths.get(layer, 0)
        self.lengths[layer] = start + num_tokens
        return StateRun(0, num_tokens, start, 0)


def context_of(
    token_ids: list[int], attend: PlainAttend, start: int = 0, logit_rows: list[int] | None = None
) -> StepContext:
    """One sequence's tokens from position `start` on."""
    rows = None if logit_rows is None else torch.tensor(logit_rows)
    return StepContext(torch.tensor(token_ids), torch.arange(start, start + len(token_ids)), rows, attend)
