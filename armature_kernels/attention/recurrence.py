"""Layers with a recurrent state: the gated delta rule (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060).

Before both is a short convolution. The state of a sequence has a constant size: the last inputs of the convolution, and a
matrix for each head. It is fp32 and changes in place, so an operation runs once for each token. The kernels compute prompts
in chunks of tokens, whose last bits depend on where a prompt is cut, unless they are asked to go token by token.

Draft tokens leave the state as it is: their inputs are kept, a few KB for each, and `recur` reads those of the accepted ones
again, so nothing is undone. A copy of the state for each draft token would be some MB to write.

`csrc/recur.h` has the kernels of a CPU. The functions whose names end in `_torch` are the reference implementation and
serve elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.attention.recurrent_sizes import MAX_KEY_SIZE, STATE_COLUMNS, RecurrentSizes
from armature_kernels.linear.activations import ROW_DTYPES
from armature_kernels.native.arguments import OpCode, RecurArguments, RecurInputsArguments
from armature_kernels.native.memory import Int64Buffer, empty
from armature_kernels.native.operations import has_kernel, run_operation


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The parameters of one layer, fp32.

    `filters` [width, channels], the last one for a token's own position; `bias` [channels]. With
    step = softplus(step_scale * x + step_bias) within `step_limits`, a head's state decays by e^(-rates * step) [heads].
    `skips` [heads] times values are added to the result. The delta rule takes in beta_scale * sigmoid(betas) of a value.
    """

    sizes: RecurrentSizes
    filters: Tensor
    bias: Tensor | None
    rates: Tensor
    step_bias: Tensor
    skips: Tensor | None = None
    step_limits: tuple[float, float] = (0.0, math.inf)
    step_scale: float = 1.0
    beta_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """What a layer's products make of a step's tokens.

    `channels` [tokens, channels]; `steps` and, with the delta rule, `betas` [tokens, heads].
    """

    channels: Tensor
    steps: Tensor
    betas: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateRun:
    """Rows `[first, first + num_tokens)` of the batch, from position `start` of the sequence in this slot.

    With `drafts` among them, at most `STATE_COLUMNS` rows, the state stays as it is before the first one. Else slot `saved` gets
    a copy of the state after the last one, unless it is negative; the next run may go on in the same slot.
    """

    first: int
    num_tokens: int
    start: int
    slot: int
    drafts: bool = False
    saved: int = -1


class StateStep:
    """The sequences of one step, at a fixed address (`state_step` in csrc/ops.h)."""

    def __init__(self, num_sequences: int = 64) -> None:
        self.runs: Sequence[StateRun] = ()
        self._buffer = Int64Buffer(1 + 6 * num_sequences)

    @property
    def address(self) -> int:
        """Address of the C structure."""
        return self._buffer.address

    @property
    def stays(self) -> bool:
        """True if the next step is described at the same address."""
        return self._buffer.stays

    def fill(self, runs: Sequence[StateRun]) -> None:
        """Describe the next step."""
        self.runs = runs
        self._buffer.fill([len(runs), *(value for run in runs for value in _fields(run))])


def _fields(run: StateRun) -> tuple[int, int, int, int, int, int]:
    return run.first, run.num_tokens, run.start, run.slot, run.drafts, run.saved


def kept_inputs(kept: Tensor, sizes: RecurrentSizes) -> RecurrentInputs:
    """Return kept inputs [tokens, input_elements] as `recur` reads them."""
    channels, steps, betas = kept.tensor_split((sizes.channels, sizes.channels + sizes.heads), 1)
    return RecurrentInputs(channels, steps, betas if sizes.has_delta else None)


def recur(
    inputs: RecurrentInputs,
    layer: Recurrence,
    states: Tensor,
    step: StateStep,
    by_token: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the result fp32 [tokens, heads * value_size] of a layer, and change the states of the step's sequences.

    Args:
        inputs: The tokens of the step.
        layer: The parameters.
        states: The layer's states of all slots, fp32 [slots, state_elements].
        step: The sequences.
        by_token: Compute no tokens together, so that results do not depend on the parts in which a prompt came.
        kept: fp32 [tokens, input_elements], which gets the inputs of runs with drafts; None if the step has none.
    """
    if not supports_recurrence(inputs, layer.sizes):
        return recur_torch(inputs, layer, states, step.runs, kept)
    sizes, tokens = layer.sizes, len(inputs.channels)
    mixed, scales = empty((tokens, sizes.channels), torch.float32), empty((tokens, 2 * sizes.heads), torch.float32)
    slot_stride, first = states.stride(0), states.data_ptr()
    wide, wide_steps = (one.dtype == torch.float32 for one in (inputs.channels, inputs.steps))
    rows = (inputs.channels.data_ptr(), inputs.steps.data_ptr(), _address(inputs.betas), step.address)
    weights = (layer.filters.data_ptr(), _address(layer.bias), layer.rates.data_ptr(), layer.step_bias.data_ptr())
    strides = (inputs.channels.stride(0), inputs.steps.stride(0), slot_stride)
    counts = (sizes.channels, sizes.heads, sizes.width, wide, wide_steps, False)
    numbers = (*layer.step_limits, layer.step_scale, layer.beta_scale)
    results = (mixed.data_ptr(), scales.data_ptr(), first, _address(kept))
    run_operation(RecurInputsArguments(*rows, *results, *weights, *strides, *counts, *numbers), mixed.numel())
    out = empty((tokens, sizes.values), torch.float32)
    reads = (mixed.data_ptr(), scales.data_ptr(), _address(layer.skips), step.address)
    matrices = first + 4 * sizes.tail_elements
    shape = (sizes.heads, sizes.key_heads, sizes.key_size, sizes.value_size, sizes.has_delta, by_token)
    run_operation(
        RecurArguments(*reads, out.data_ptr(), matrices, slot_stride, sizes.channels, *sizes.places, *shape),
        out.numel() * sizes.key_size,
    )
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def supports_recurrence(inputs: RecurrentInputs, sizes: RecurrentSizes) -> bool:
    """Return True if the native kernels read these rows."""
    given = [one for one in (inputs.channels, inputs.steps, inputs.betas) if one is not None]
    plain = all(one.dtype in ROW_DTYPES and one.stride(1) == 1 and one.device.type == "cpu" for one in given)
    plain = plain and sizes.key_size <= MAX_KEY_SIZE
    return plain and has_kernel(OpCode.RECUR_INPUTS) and has_kernel(OpCode.RECUR)


def recur_torch(
    inputs: RecurrentInputs, layer: Recurrence, states: Tensor, runs: Sequence[StateRun], kept: Tensor | None = None
) -> Tensor:
    """Compute `recur` by torch."""
    sizes = layer.sizes
    steps = F.softplus(inputs.steps.float() * layer.step_scale + layer.step_bias).clamp(*layer.step_limits)
    decays = torch.exp(-layer.rates * steps)
    factors = steps if inputs.betas is None else inputs.betas.float().sigmoid() * layer.beta_scale
    out = torch.empty(len(steps), sizes.values, device=states.device)
    for run in runs:
        own, state = slice(run.first, run.first + run.num_tokens), states[run.slot]
        if run.start == 0:
            state[: sizes.state_elements] = 0
        if run.drafts:
            state = state.clone()
            given = [one for one in (inputs.channels, inputs.steps, inputs.betas) if one is not None]
            whole = torch.cat([one[own].float() for one in given], 1)
            if kept is not None:
                kept[own, : whole.shape[1]] = whole
        mixed = _convolved(inputs.channels[own].float(), layer, state)
        out[own] = _recurred(mixed, decays[own], factors[own], layer, state)
        if run.saved >= 0 and not run.drafts:
            states[run.saved] = state
    return out


def _convolved(x: Tensor, layer: Recurrence, state: Tensor) -> Tensor:
    before, channels = layer.sizes.width - 1, layer.sizes.channels
    tail = state[: before * channels].view(before, channels)
    whole = torch.cat((tail, x))
    tail.copy_(whole[len(x) :])
    sums = (whole.unfold(0, before + 1, 1).transpose(1, 2) * layer.filters).sum(1)
    return F.silu(sums if layer.bias is None else sums + layer.bias)


def _recurred(mixed: Tensor, decays: Tensor, factors: Tensor, layer: Recurrence, state: Tensor) -> Tensor:
    sizes = layer.sizes
    stored = state[sizes.tail_elements : sizes.state_elements].view(sizes.heads, -1, sizes.key_size, STATE_COLUMNS)
    matrix = stored.transpose(1, 2).flatten(2)[..., : sizes.value_size].clone()
    query, key, value = (
        mixed[:, place : place + size].view(len(mixed), heads, -1)
        for place, size, heads in zip(
            sizes.places,
            (sizes.keys, sizes.keys, sizes.values),
            (sizes.key_heads, sizes.key_heads, sizes.heads),
            strict=True,
        )
    )
    if sizes.has_delta:
        query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
        query = query * sizes.key_size**-0.5
    query, key = (one.repeat_interleave(sizes.heads // sizes.key_heads, 1) for one in (query, key))
    results = []
    for at in range(len(mixed)):
        matrix *= decays[at, :, None, None]
        known = torch.einsum("hk,hkv->hv", key[at], matrix) if sizes.has_delta else 0.0
        matrix += key[at, :, :, None] * ((value[at] - known) * factors[at, :, None])[:, None]
        results.append(torch.einsum("hk,hkv->hv", query[at], matrix))
    padded = F.pad(matrix, (0, stored.shape[1] * STATE_COLUMNS - sizes.value_size))
    stored.copy_(padded.view(sizes.heads, sizes.key_size, -1, STATE_COLUMNS).transpose(1, 2))
    result = torch.stack(results)
    if layer.skips is not None:
        result += value * layer.skips[:, None]
    return result.flatten(1)
