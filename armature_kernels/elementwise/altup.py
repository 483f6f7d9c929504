"""Several hidden states for each token, its streams (AltUp, arXiv 2301.13310): predicted before a layer, corrected after it.

A layer computes with the first stream alone. Small matrices, which depend on that stream, say how the streams become those
that the layer finds, and how what the layer changed reaches the others.

`csrc/altup.h` computes on a CPU; the functions whose names end in `_torch` are the reference and serve elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armature_kernels.linear.activations import ROW_DTYPES, Activations, RowGroups, allocate_output, quantise
from armature_kernels.native.arguments import AltUpArguments, MatchArguments, OpCode, RowSink
from armature_kernels.native.operations import has_kernel, run_operation

MAX_STREAMS = 8  # csrc/ops.h


@dataclass(frozen=True, slots=True)
class StreamMix:
    """How the streams of each token are mixed.

    `logits` fp32 [tokens, streams]: the factors of a token are a product of `weights` with their tanh. `weights` fp32
    [streams * streams, streams] for a prediction, [streams, streams] for a correction. `size`: elements of a stream.
    """

    logits: Tensor
    weights: Tensor
    size: int

    @property
    def num_streams(self) -> int:
        """Number of streams."""
        return self.logits.shape[1]

    def factors(self) -> Tensor:
        """Return the factors of each token, computed by torch."""
        return torch.tanh(self.logits) @ self.weights.T

    def streams(self, states: Tensor) -> Tensor:
        """Return the streams [tokens, streams, size] in states, a view."""
        sizes, strides = (len(states), self.num_streams, self.size), (states.stride(0), self.size, 1)
        return states.as_strided(sizes, strides, states.storage_offset())


@dataclass(frozen=True, slots=True)
class Correction:
    """What a layer made of the first stream: `scale` times `activated` fp32 [tokens, size].

    `factors` fp32 [size] are multiplied with the first stream for the result.
    """

    activated: Tensor
    scale: float
    factors: Tensor


def predict_streams(states: Tensor, mix: StreamMix) -> None:
    """Overwrite the streams by those that the next layer finds; states fp32 [tokens, at least streams * size]."""
    if _supports(states, mix):
        _run(states, mix, None, RowSink())
    else:
        predict_streams_torch(states, mix)


def predict_streams_torch(states: Tensor, mix: StreamMix) -> None:
    """Predict the streams by torch."""
    streams, number = mix.streams(states), mix.num_streams
    streams += torch.einsum("tki,tis->tks", mix.factors().view(-1, number, number), streams)


def correct_streams(
    states: Tensor, mix: StreamMix, correction: Correction, dtype: torch.dtype, group: RowGroups | None = None
) -> Activations:
    """Add to each stream its share of what the layer changed.

    Returns the first stream times the correction's factors [tokens, size], in `dtype` or quantised.
    """
    if dtype not in ROW_DTYPES or not _supports(states, mix) or not correction.activated.is_contiguous():
        first = correct_streams_torch(states, mix, correction).to(dtype)
        return first if group is None else quantise(first, group)
    out, sink = allocate_output(len(states), mix.size, group, dtype)
    _run(states, mix, correction, sink)
    return out


def correct_streams_torch(states: Tensor, mix: StreamMix, correction: Correction) -> Tensor:
    """Correct the streams by torch, and return the first one times the factors, fp32."""
    streams = mix.streams(states)
    change = correction.scale * correction.activated - streams[:, 0]
    streams += (1 + mix.factors())[..., None] * change[:, None]
    return streams[:, 0] * correction.factors


def _supports(states: Tensor, mix: StreamMix) -> bool:
    plain = states.dtype == torch.float32 and states.stride(1) == 1 and mix.logits.is_contiguous()
    return plain and states.device.type == "cpu" and mix.num_streams <= MAX_STREAMS and has_kernel(OpCode.ALTUP)


def _run(states: Tensor, mix: StreamMix, correction: Correction | None, sink: RowSink) -> None:
    tensors = (states, mix.logits, mix.weights)
    given = (None, None) if correction is None else (correction.activated.data_ptr(), correction.factors.data_ptr())
    sizes = (states.stride(0), len(states), mix.size, mix.num_streams)
    scale = 0.0 if correction is None else correction.scale
    arguments = AltUpArguments(*(tensor.data_ptr() for tensor in tensors), *given, *sizes, scale, sink)
    run_operation(arguments, OpCode.ALTUP, len(states) * mix.num_streams * mix.size)


def match_rows(out: Tensor, x: Tensor, like: Tensor, floor: float, add: bool = False) -> None:
    """Write x, scaled to the root mean square of the rows of `like`, to out, or add it; all [tokens, size].

    x is fp32 or bf16, the others are fp32. Its mean square counts as `floor` if it is smaller.
    """
    tensors = (x, like, out)
    plain = x.dtype in ROW_DTYPES and all(one.stride(1) == 1 and one.device.type == "cpu" for one in tensors)
    if not (plain and has_kernel(OpCode.MATCH)):
        scaled = match_rows_torch(x, like, floor)
        out.copy_(out + scaled if add else scaled)
        return
    sizes = (*(one.stride(0) for one in tensors), *x.shape, x.dtype == torch.float32, add)
    arguments = MatchArguments(*(one.data_ptr() for one in tensors), *sizes, floor)
    run_operation(arguments, OpCode.MATCH, x.numel())


def match_rows_torch(x: Tensor, like: Tensor, floor: float) -> Tensor:
    """Return x scaled to the root mean square of the rows of `like`, fp32, by torch."""
    wide = x.float()
    squares = wide.square().mean(-1, keepdim=True).clamp_min(floor)
    return wide * (like.square().mean(-1, keepdim=True) / squares).sqrt()
