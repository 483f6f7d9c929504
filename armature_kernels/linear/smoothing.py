"""Factors that balance channels before weights are quantized, and the sums over columns from which they follow.

`smooth_scales` balances channels before this step, as in SmoothQuant (Xiao et al., 2022). Dividing a norm's weight by
t and multiplying the columns it feeds by t leaves the function unchanged. Large models have some norm channels that
are tens of times larger than others, with small weights behind them. One scale per row of activations, or per group of
weights, would then have to cover those channels alone; `t` balances both sides, for any ratio.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CACHED_ROWS = 32  # that are squared at a time: of 8,192 inputs 1 MiB, which stays in a cache


def column_maxima(parts: Iterable[Tensor], columns: int, device: torch.device | None = None) -> Tensor:
    """Return the largest magnitude of each input, fp32 [in], over the rows [n, in] of all parts.

    The parts must be on `device`.
    """
    largest = torch.zeros(columns, device=device)
    for rows in parts:
        low, high = rows.aminmax(dim=0)
        torch.maximum(largest, torch.maximum(high, -low).float(), out=largest)
    return largest


def column_mean_squares(parts: Iterable[Tensor], columns: int) -> Tensor:
    """Return the mean square of each input, fp32 [in], over the rows [n, in] of all parts."""
    sums = [(column_squares(rows), len(rows)) for rows in parts]
    return mean_of_squares([squares for squares, _ in sums], columns, sum(count for _, count in sums))


def column_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each input, fp32 [in], over rows [n, in]."""
    total = torch.zeros(rows.shape[1])
    for few in torch.split(rows, _CACHED_ROWS):
        total += few.to(torch.float32, copy=True).square_().sum(0)
    return total


def mean_of_squares(sums: Iterable[Tensor], columns: int, count: int) -> Tensor:
    """Return the mean square of each input, fp32 [in], from the sums of parts [in], added in their order."""
    total = torch.zeros(columns)
    for squares in sums:
        total += squares
    return total / max(1, count)


def smooth_scales(norm: Tensor, largest: Tensor) -> Tensor:
    """Return t [in] from a norm's weight [in] and the `column_maxima` [in] of the weights it feeds.

    After scaling, both become the square root of their product, up to sign. A channel that is zero on either side
    keeps t = 1.
    """
    alive = (norm != 0) & (largest > 0)
    return torch.where(alive, (norm.float().abs() / torch.where(alive, largest, 1.0)).sqrt(), 1.0)


def activation_aware_scales(mean_squares: Tensor, weight_squares: Tensor) -> Tensor:
    """Return t [in] from the mean squares [in] of a product's inputs and of its weight's columns.

    After scaling, inputs and columns have equal root mean squares, up to a factor: t = sqrt(rms(x) / rms(w)), divided
    by its geometric mean (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023, search over the exponent;
    here it is 1/2). A channel that is zero on either side keeps t = 1.
    """
    alive = (mean_squares > 0) & (weight_squares > 0)
    ratio = mean_squares / torch.where(alive, weight_squares, 1.0)
    exponents = torch.where(alive, torch.where(alive, ratio, 1.0).log() / 4, 0.0)
    exponents -= torch.where(alive, exponents.sum() / alive.sum().clamp_min(1), 0.0)
    return exponents.exp()
