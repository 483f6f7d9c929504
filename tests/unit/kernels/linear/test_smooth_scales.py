"""Equalising: the same function, the same codes whatever a checkpoint's channels were multiplied by, and outliers that no longer hurt."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.linear.quantization import quantise_int4
from armature_kernels.linear.smoothing import column_maxima, smooth_scales
from hypothesis_examples import examples


def layer(seed: int, inputs: int = 64, outputs: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's weight, both signs, and the matrix behind it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(inputs, generator=generator) + 0.01, torch.randn(outputs, inputs, generator=generator)


def planted(norm: torch.Tensor, weight: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function with a quarter of the channels 30 to 100 times as large, powers of two apart from that, so that it is exact."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.where(torch.rand(len(norm), generator=generator) < 0.25, 64.0, 1.0)
    return norm * factor, weight / factor


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 999), st.integers(1, 90))
def test_it_is_the_same_function(seed, inputs):
    norm, weight = layer(seed, inputs)
    x = torch.randn(5, inputs, dtype=torch.float64)
    t = smooth_scales(norm, column_maxima((weight,), inputs))
    before = (x * norm) @ weight.double().T
    torch.testing.assert_close((x * (norm / t)) @ (weight * t).double().T, before, rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 999), st.integers(0, 999))
def test_what_is_rounded_does_not_depend_on_how_channels_were_scaled(seed, other):
    norm, weight = layer(seed)
    large, small = planted(norm, weight, other)
    codes = [
        quantise_int4(some * smooth_scales(scale, column_maxima((some,), 64)), 32, zero_points=False)
        for scale, some in ((norm, weight), (large, small))
    ]
    assert torch.equal(codes[0].codes, codes[1].codes)
    assert torch.equal(codes[0].scales, codes[1].scales)


def test_outlier_channels_no_longer_hurt():
    norm, weight = layer(1, inputs=256)
    large, small = planted(norm, weight, 2)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    wanted = (x * norm) @ weight.T

    def loss(scale: torch.Tensor, some: torch.Tensor) -> float:
        product = (x * scale) @ quantise_int4(some, 64, zero_points=False).dequantise().T
        return float((product - wanted).norm() / wanted.norm())

    t = smooth_scales(large, column_maxima((small,), 256))
    assert loss(large / t, small * t) < 1.3 * loss(norm, weight)
    assert loss(large, small) > 2 * loss(norm, weight)


def test_channels_that_are_zero_stay():
    norm, weight = torch.tensor([1.0, 0.0, 4.0, -2.0]), torch.tensor([[1.0, 3.0, 0.0, 8.0], [-4.0, 3.0, 0.0, 1.0]])
    assert smooth_scales(norm, column_maxima((weight,), 4)).tolist() == [0.5, 1.0, 1.0, 0.5]


def test_maxima_are_over_all_rows():
    parts = (torch.tensor([[1.0, -5.0]]), torch.tensor([[-3.0, 2.0], [0.5, 4.0]], dtype=torch.bfloat16))
    assert column_maxima(parts, 2).tolist() == [3.0, 5.0]
