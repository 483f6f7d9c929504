"""Weights to integers: the nearest that a scale allows, a scale no worse than the plain one, and what is extreme or empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.linear.quantization import Int4Weight, quantise_int4, quantise_int8
from hypothesis_examples import examples

GROUPS = st.sampled_from((32, 64, 128))


def weight_of(outputs: int, inputs: int, seed: int, magnitude: float) -> torch.Tensor:
    """Normal, with some zeros and a channel a hundred times as large, which is what hurts groups."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 10.0**magnitude
    weight[:, seed % inputs] *= 100
    weight[torch.rand(outputs, inputs, generator=generator) < 0.1] = 0
    return weight


def plain_error(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Squared error [out, groups] of the largest weight at -8 and all others to the nearest, as Q4_0 has it."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).view(weight.shape[0], -1, group)
    top = padded.gather(-1, padded.abs().argmax(-1, keepdim=True))
    scale = (top / -8).bfloat16().float()
    codes = torch.where(scale == 0, 0, padded / scale).round().clamp(-8, 7)
    return (codes * scale - padded).square().sum(-1)


def group_error(weight: torch.Tensor, quantised: Int4Weight) -> torch.Tensor:
    difference = torch.nn.functional.pad(quantised.dequantise() - weight, (0, -quantised.inputs % quantised.group))
    return difference.view(weight.shape[0], -1, quantised.group).square().sum(-1)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 99), st.floats(-20, 20), GROUPS, st.booleans())
def test_every_code_is_the_nearest_that_its_scale_allows(outputs, inputs, seed, magnitude, group, zero_points):
    weight = weight_of(outputs, inputs, seed, magnitude)
    quantised = quantise_int4(weight, group, zero_points)
    assert (quantised.codes.shape, quantised.codes.dtype) == ((outputs, -(-inputs // group) * group), torch.uint8)
    scale = quantised.scales.float().abs().repeat_interleave(group, 1)[:, :inputs]
    codes = quantised.codes[:, :inputs]
    error, inside = (quantised.dequantise() - weight).abs(), (codes > 0) & (codes < 15)
    assert bool((error <= scale * 0.501)[inside].all())
    assert bool((error <= scale * 15).all())  # what is cut off is not lost altogether


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(16, 40), st.integers(128, 300), st.integers(0, 99), st.floats(-15, 15), GROUPS)
def test_the_search_is_no_worse_than_the_largest_weight_at_minus_eight(outputs, inputs, seed, magnitude, group):
    weight = weight_of(outputs, inputs, seed, magnitude)
    searched, plain = group_error(weight, quantise_int4(weight, group, zero_points=False)), plain_error(weight, group)
    assert (
        searched.sum() <= plain.sum() * 1.001 + weight.square().sum() * 2**-18
    )  # a scale of BF16 is off by 2^-9 of itself


def test_the_search_gains_what_it_is_there_for():
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    error = group_error(weight, quantise_int4(weight, 64, zero_points=False)).sum()
    assert error < 0.92 * plain_error(weight, 64).sum()
    assert group_error(weight, quantise_int4(weight, 64, zero_points=True)).sum() < error


@pytest.mark.parametrize("zero_points", (False, True))
@pytest.mark.parametrize("value", (0.0, 1e-38, -1e-36, 5.0, -1e30, 3e38))
def test_groups_of_one_value(value, zero_points):
    weight = torch.full((3, 70), value)
    quantised = quantise_int4(weight, 32, zero_points)
    torch.testing.assert_close(quantised.dequantise(), weight, rtol=2**-8, atol=1e-35)


def test_a_group_of_zeros_holds_zeros_and_so_does_what_pads_the_last_one():
    weight = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    weight[:, 32:64] = 0
    quantised = quantise_int4(weight, 32, zero_points=False)
    assert bool((quantised.codes[:, 32:64] == 8).all())
    assert bool((quantised.codes[:, 70:] == 8).all())
    assert bool((quantised.scales[:, 1] == 0).all())


@pytest.mark.parametrize("zero_points", (False, True))
def test_rows_may_come_alone(zero_points):
    weight = weight_of(700, 640, 5, 0.0)  # several chunks
    whole = quantise_int4(weight, 64, zero_points)
    for rows in (slice(0, 1), slice(3, 350), slice(350, 700)):
        part = quantise_int4(weight[rows], 64, zero_points)
        assert torch.equal(part.codes, whole.codes[rows])
        assert torch.equal(part.scales, whole.scales[rows])


@pytest.mark.parametrize("zero_points", (False, True))
def test_what_is_important_is_rounded_better(zero_points):
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    importance = torch.ones(256)
    importance[::8] = 100
    evenly = quantise_int4(weight, 64, zero_points).dequantise() - weight
    weighed = quantise_int4(weight, 64, zero_points, importance).dequantise() - weight
    assert weighed[:, ::8].square().sum() < 0.9 * evenly[:, ::8].square().sum()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 99), st.floats(-20, 20))
def test_eight_bits_are_within_half_a_step(outputs, inputs, seed, magnitude):
    weight = weight_of(outputs, inputs, seed, magnitude)
    quantised = quantise_int8(weight)
    error, scale = (quantised.dequantise() - weight).abs(), quantised.scales.float()
    assert bool((error <= scale * 0.501)[quantised.codes.abs() < 127].all())
    assert bool(
        (error <= scale).all()
    )  # the scale may round down: the largest is cut off by a quarter of a percent, half a step
    assert quantised.codes.dtype == torch.int8


def test_eight_bits_of_nothing():
    assert bool((quantise_int8(torch.zeros(3, 5)).dequantise() == 0).all())
