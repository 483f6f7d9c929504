"""Layers of a model with several hidden states for each token (AltUp, arXiv 2301.13310), as Gemma 3n has them.

A layer reads and writes one row of *states* for each token, FP32: its streams one after the other, then what each layer
reads of the token (per-layer inputs).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.models.decoders.config import ModelConfig
from app.models.decoders.layer_config import AltUpConfig, NormConfig
from app.models.decoders.layers import Attention, DecoderMLP, LayerInput, Norm, StoredVector
from armature_kernels.attention.attention import RopeAngles
from armature_kernels.attention.context import Attend
from armature_kernels.elementwise.activations import convert_rows
from armature_kernels.elementwise.altup import Correction, StreamMix, correct_streams, match_rows, predict_streams
from armature_kernels.elementwise.norms import contiguous, copy_rows, empty_rows, gather
from armature_kernels.linear.activations import Activations, quantize
from armature_kernels.linear.linear import Linear

_MAGNITUDE_FLOOR = 1e-5  # the least mean square of a row that gets the magnitude of another
_ROOT_HALF = math.sqrt(0.5)


def _scaled(norm: NormConfig, factor: float) -> NormConfig:
    """Return the norm of x as a norm of factor · x."""
    return replace(norm, eps=norm.eps * factor**2)


class StreamMatrix(StoredVector):
    """A matrix from which the factors between streams follow."""

    def fill(self, weight: float, device: torch.device | None) -> None:
        """Set all elements to 0: with any other value streams could grow from layer to layer without bound."""
        super().fill(0.0, device)


class StreamMixer(nn.Module):
    """Predicts the streams that a layer finds, and corrects them by its result, sqrt(2) times the first stream."""

    def __init__(self, config: ModelConfig, altup: AltUpConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, streams = f"model.layers.{layer}.altup", config.hidden_size, altup.num_streams
        self.size, self.dtype = size, dtype
        self.router = Linear((f"{at}.modality_router",), size, streams)
        self.before, self.after = (
            Norm(f"{at}.router_norm", size, _scaled(config.norm, factor), dtype, gain=1 / size)
            for factor in (1.0, 1 / _ROOT_HALF)
        )
        self.predictions = StreamMatrix(f"{at}.prediction_coefs", "weight", streams**2, streams)
        self.corrections = StreamMatrix(f"{at}.correction_coefs", "weight", streams, streams)
        self.factors = StoredVector(at, "correct_output_scale", size)

    def predict(self, states: Tensor) -> None:
        predict_streams(states, self._mix(self.before, states[:, : self.size], self.predictions))

    def correct(self, states: Tensor, activated: Tensor, feeds: Linear) -> Activations:
        """Correct the streams by activated [tokens, size], and return the scaled first one as the input of a product."""
        mix = self._mix(self.after, activated, self.corrections)
        correction = Correction(activated, _ROOT_HALF, self.factors.weight)
        return correct_streams(states, mix, correction, self.dtype, feeds.activation_group(len(states)))

    def _mix(self, norm: Norm, x: Tensor, weights: StoredVector) -> StreamMix:
        rows = norm(x)
        assert isinstance(rows, Tensor), "a norm that feeds no product returns a tensor"
        return StreamMix(self.router.multiply_wide(rows), weights.weight, self.size)


class LowRankBranch(nn.Module):
    """The branch beside attention (LAuReL, arXiv 2411.07501): x + norm(right left x), x being the norm of the stream."""

    def __init__(self, config: ModelConfig, altup: AltUpConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, norm = f"model.layers.{layer}", config.hidden_size, config.norm
        self.left = Linear((f"{at}.laurel.linear_left",), size, altup.laurel_rank)
        self.right = Linear((f"{at}.laurel.linear_right",), altup.laurel_rank, size)
        self.norm = Norm(f"{at}.input_layernorm", size, norm, dtype, self.left)
        self.plain_norm = Norm(f"{at}.input_layernorm", size, norm)  # the other may be divided by smooth scales
        self.last_norm = Norm(f"{at}.laurel.post_laurel_norm", size, norm)

    def add_to(self, stream: Tensor) -> None:
        """Add the branch of stream [tokens, size] to it."""
        left = self.left(self.norm(stream))
        group = self.right.activation_group(len(left))
        right = self.right(left if group is None else quantize(left, group))
        self.plain_norm.add_to(stream, stream)
        self.last_norm.add_to(stream, right)


class AltUpLayer(nn.Module):
    """Attention and MLP with norms around them, which read and change the first of several streams.

    The sum of the stream, attention and the branch beside it is divided by sqrt(2): by what reads the sum, whose norm
    does not change, and by the correction.
    """

    def __init__(self, config: ModelConfig, altup: AltUpConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        at, size, norm = f"model.layers.{layer}", config.hidden_size, config.norm
        self.size = size
        self.mixer = StreamMixer(config, altup, layer, dtype)
        self.attention, self.mlp = Attention(config, layer, dtype), DecoderMLP(config, layer)
        self.branch, self.input = LowRankBranch(config, altup, layer, dtype), LayerInput(config, altup, layer)
        self.attention_norm = Norm(f"{at}.input_layernorm", size, norm, dtype, self.attention.first)
        self.mixed_norm = Norm(f"{at}.post_attention_layernorm", size, norm)
        doubled = _scaled(norm, 1 / _ROOT_HALF)
        self.mlp_norm = Norm(f"{at}.pre_feedforward_layernorm", size, doubled, dtype, self.mlp.first)
        self.gated_norm = Norm(f"{at}.post_feedforward_layernorm", size, norm, gain=1 / _ROOT_HALF)

    def forward(self, states: Tensor, angles: RopeAngles | None, attend: Attend, rows: Tensor | None) -> Tensor:
        self.mixer.predict(states)
        mixed = self.attention(self.attention_norm(states[:, : self.size]), angles, attend)
        if rows is not None:
            states, mixed = gather(states, rows), gather(mixed, rows)
        stream = contiguous(states[:, : self.size])
        self.branch.add_to(stream)
        self.mixed_norm.add_to(stream, self.attention.out(mixed))
        self.gated_norm.add_to(stream, self.mlp(self.mlp_norm(stream)))
        self.input.add_to(states, self.mixer.correct(states, stream, self.input.gate))
        return states


class AltUpEntry(nn.Module):
    """The states before the first layer: products of the embeddings beside them, and what each layer reads.

    A layer reads the mean of a row of `table` and the norm of a product, times sqrt(2).
    """

    def __init__(self, config: ModelConfig, altup: AltUpConfig, table: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        size, width = config.hidden_size, altup.input_size
        self.size, self.width, self.dtype, self.table = size, width, dtype, table
        self.end = altup.num_streams * size
        sources = tuple(f"model.altup_projections.{number}" for number in range(altup.num_streams - 1))
        self.streams = Linear(sources, size, len(sources) * size) if sources else None
        self.inputs = Linear(("model.per_layer_model_projection",), size, config.num_layers * width)
        # The product is divided by sqrt(size) before its norm.
        norm = _scaled(config.norm, math.sqrt(size))
        self.norm = Norm("model.per_layer_projection_norm", width, norm, gain=_ROOT_HALF)

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the states [tokens, width] of tokens with these embeddings FP32 [tokens, size]."""
        inputs: Tensor = self.table(token_ids)
        self.norm.add_to(inputs.view(-1, self.width), self._product(self.inputs, embedded).view(-1, self.width))
        states = empty_rows(embedded, self.end + inputs.shape[1])
        copy_rows(states[:, : self.size], embedded)
        copy_rows(states[:, self.end :], inputs)
        if self.streams is None:
            return states
        streams = self._product(self.streams, embedded)
        for first in range(self.size, self.end, self.size):
            part = streams[:, first - self.size : first]
            match_rows(states[:, first : first + self.size], part, embedded, _MAGNITUDE_FLOOR)
        return states

    def _product(self, linear: Linear, embedded: Tensor) -> Tensor:
        result: Tensor = linear(convert_rows(embedded, self.dtype, linear.activation_group(len(embedded))))
        return result


class AltUpExit(nn.Module):
    def __init__(self, config: ModelConfig, altup: AltUpConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = config.hidden_size, dtype
        self.streams = nn.ModuleList(
            Linear((f"model.altup_unembed_projections.{number}",), config.hidden_size, config.hidden_size)
            for number in range(altup.num_streams - 1)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return the sum FP32 [tokens, size] of the streams in states [tokens, width]."""
        first = states[:, : self.size]
        total = contiguous(first)
        for number, linear in enumerate(self.streams, 1):
            assert isinstance(linear, Linear), "the list holds products"
            rows = states[:, number * self.size : (number + 1) * self.size]
            product = linear(convert_rows(rows, self.dtype, linear.activation_group(len(rows))))
            match_rows(total, product, first, _MAGNITUDE_FLOOR, add=True)
        return total
