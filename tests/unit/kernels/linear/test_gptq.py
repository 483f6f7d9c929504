"""Compensated rounding: plain rounding where inputs have nothing to do with each other, and a better product where they have."""

from __future__ import annotations

import pytest
import torch

from armature_kernels.linear.quantization import (
    DAMPING,
    FITTED_ROWS,
    InputStatistics,
    Int4Weight,
    compute_gptq_factors,
    fitted_scales,
    gptq_int4,
    gptq_int4_torch,
    quantise_int4,
    symmetric_codes,
    symmetric_scales,
    symmetric_scales_torch,
)
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level, levels


def inputs_of(columns: int, rank: int = 20, rows: int = 600) -> torch.Tensor:
    """Inputs that move together in `rank` directions, with a little of their own, and one channel that is always zero."""
    generator = torch.Generator().manual_seed(columns)
    directions = torch.randn(rank, columns, generator=generator)
    x = torch.randn(rows, rank, generator=generator) @ directions
    x += 0.3 * torch.randn(rows, columns, generator=generator)
    x[:, columns // 2] = 0
    return x


def weight_of(outputs: int, columns: int) -> torch.Tensor:
    return torch.randn(outputs, columns, generator=torch.Generator().manual_seed(7))


def loss(x: torch.Tensor, weight: torch.Tensor, rounded: Int4Weight) -> float:
    return float((x @ (rounded.dequantise() - weight).T).square().sum())


@pytest.mark.parametrize("zero_points", (False, True))
@pytest.mark.parametrize("columns", (96, 300))
def test_products_come_closer(columns, zero_points):
    x, weight = inputs_of(columns), weight_of(40, columns)
    rounded = gptq_int4(weight, 64, zero_points, [compute_gptq_factors(x.T @ x)])
    assert loss(x, weight, rounded) < 0.5 * loss(x, weight, quantise_int4(weight, 64, zero_points))
    fresh = inputs_of(columns, rows=1200)[600:]
    assert loss(fresh, weight, rounded) < 0.6 * loss(fresh, weight, quantise_int4(weight, 64, zero_points))


@pytest.mark.parametrize("zero_points", (False, True))
def test_without_correlation_it_is_plain_rounding(zero_points):
    weight = weight_of(9, 200)
    for gptq_factors in (
        compute_gptq_factors(torch.diag(torch.rand(200) + 0.1)),
        compute_gptq_factors(torch.zeros(200, 200)),
    ):
        rounded = gptq_int4(weight, 32, zero_points, [gptq_factors])
        if gptq_factors.importance is None or zero_points:
            nearest = quantise_int4(weight, 32, zero_points)
        else:
            scales = fitted_scales(in_groups(weight), in_groups(gptq_factors.importance[None]))
            codes = symmetric_codes(in_groups(weight), scales).flatten(1) + 8
            nearest = Int4Weight(codes.to(torch.uint8), scales.squeeze(-1).bfloat16(), None, 32, 200)
        torch.testing.assert_close(rounded.dequantise(), nearest.dequantise(), rtol=0, atol=1e-6)
        assert torch.equal(rounded.codes[:, 200:], nearest.codes[:, 200:])


def in_groups(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % 32)).view(len(values), -1, 32)


def test_scales_are_fitted_to_important_inputs():
    values, weigh = weight_of(300, 32)[:, None], torch.logspace(-2, 1, 32)
    values[7], values[8, 0, 3] = 0, 1e30

    def loss_of(scales: torch.Tensor) -> torch.Tensor:
        return ((symmetric_codes(values, scales) * scales - values).square() * weigh).sum(-1)

    plain, fitted = symmetric_scales(values), fitted_scales(values, weigh)
    torch.testing.assert_close(fitted_scales(values, torch.ones(32)), plain, rtol=0.1, atol=0)
    ratio = loss_of(fitted) / loss_of(plain)
    assert float(ratio[:7].mean()) < 0.97 and float(ratio[9:].mean()) < 0.97
    assert bool(torch.isfinite(fitted).all()) and bool((fitted * plain >= 0).all())
    assert float(fitted[7]) == 0


def test_rows_may_come_alone():
    x, weight = inputs_of(160), weight_of(30, 160)
    gptq_factors = compute_gptq_factors(x.T @ x)
    whole = gptq_int4(weight, 64, False, [gptq_factors])
    for rows in (slice(0, 7), slice(7, 30)):
        part = gptq_int4(weight[rows], 64, False, [gptq_factors])
        assert (
            part.codes != whole.codes[rows]
        ).float().mean() < 0.01  # products of another size may sum in another order
        assert torch.equal(part.scales, whole.scales[rows])


def test_factors_belong_to_the_inputs():
    x, factors = inputs_of(64), torch.rand(64) + 0.5
    scaled = x / factors
    divided, plain = compute_gptq_factors(x.T @ x, factors), compute_gptq_factors(scaled.T @ scaled)
    assert torch.equal(divided.rounding_order, plain.rounding_order)
    torch.testing.assert_close(divided.inverse_root, plain.inverse_root, rtol=1e-3, atol=1e-3)


def test_the_root_is_that_of_the_inverse():
    x = inputs_of(50)
    correlation = (x.T @ x).double()
    gptq_factors = compute_gptq_factors(correlation)
    root = gptq_factors.inverse_root
    damped = (correlation / correlation.diagonal().mean() + DAMPING * torch.eye(50))[gptq_factors.rounding_order][
        :, gptq_factors.rounding_order
    ]
    loudness = correlation.diagonal()[gptq_factors.rounding_order]
    assert bool((loudness[:-1] >= loudness[1:]).all())
    torch.testing.assert_close(root.T @ root @ damped, torch.eye(50, dtype=torch.float64), rtol=0, atol=1e-6)
    assert torch.equal(root, root.triu())


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("rows", "columns", "group"), ((1, 32, 32), (70, 96, 32), (33, 300, 64), (9, 70, 128)))
@pytest.mark.parametrize("double_quantized", (False, True))
def test_native_codes_are_those_of_torch(level, rows, columns, group, double_quantized):
    x, weight = inputs_of(columns), weight_of(rows, columns)
    factors = compute_gptq_factors(x.T @ x)
    with at_level(level):
        assert has_kernel(OpCode.INT4_GPTQ)
        native = gptq_int4(weight, group, False, [factors], double_quantized=double_quantized)
    expected = gptq_int4_torch(weight, group, False, [factors], double_quantized=double_quantized)
    assert native.codes.shape == expected.codes.shape
    assert bool((native.codes[:, columns:] == 8).all())
    assert loss(x, weight, native) == pytest.approx(loss(x, weight, expected), rel=0.01)
    if torch.equal(native.scales, expected.scales):
        assert (native.codes != expected.codes).float().mean() < 0.02  # a tie may fall either way, and errors spread


@pytest.mark.parametrize("level", levels())
def test_native_scales_are_those_of_torch(level):
    values = torch.randn(50, 7, 32, generator=torch.Generator().manual_seed(3))
    values[3, 2], values[4, 1, 0], values[5] = 0, 100, 1e-30
    with at_level(level):
        native = symmetric_scales(values)
    expected = symmetric_scales_torch(values)
    assert (native != expected).float().mean() < 0.01  # two candidates that fit equally well
    torch.testing.assert_close(native[3:6], expected[3:6], rtol=0.01, atol=0)


def test_few_rows_are_relied_on_less():
    x, weight = torch.randn(1100, 96, generator=torch.Generator().manual_seed(1)), weight_of(40, 96)
    shown = InputStatistics(x[:60].square().mean(0), (x[:60].T @ x[:60],), num_rows=60)
    assert shown.damping(96) == 1.6 and InputStatistics(shown.mean_squares, (), 5000).damping(96) == DAMPING
    assert all(block.importance is None for block in shown.gptq_factors(None, 32))
    many = InputStatistics(shown.mean_squares, shown.correlations, FITTED_ROWS)
    assert all(block.importance is not None for block in many.gptq_factors(None, 32))
    losses = [
        loss(x[60:], weight, gptq_int4(weight, 32, False, factors))
        for factors in (shown.gptq_factors(None, 32), [compute_gptq_factors(x[:60].T @ x[:60])])
    ]
    assert losses[0] < losses[1]  # what the rows show is chance: inputs have nothing to do with each other
