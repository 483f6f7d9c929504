"""Channel smoothing before weights are quantised, as in SmoothQuant (Xiao et al., 2022).

Dividing a norm's weight by t and multiplying the columns it feeds by t leaves the function unchanged. Large models
have some norm channels that are tens of times larger than others, with small weights behind them. One scale per
row of activations, or per group of weights, would then have to cover those channels alone. `t` balances both
sides, for any ratio.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def column_maxima(parts: Iterable[Tensor], columns: int, device: torch.device | None = None) -> Tensor:
    """Return the largest magnitude of each input, fp32 [in], over the rows [n, in] of all parts.

    The parts must be on `device`.
    """
    largest = torch.zeros(columns, device=device)
    for rows in parts:
        low, high = rows.aminmax(dim=0)
        torch.maximum(largest, torch.maximum(high, -low).float(), out=largest)
    return largest


def gauge(norm: Tensor, largest: Tensor) -> Tensor:
    """Return t [in] from a norm's weight [in] and the `column_maxima` [in] of the weights it feeds.

    After scaling, both become the square root of their product, up to sign. A channel that is zero on either side
    keeps t = 1.
    """
    alive = (norm != 0) & (largest > 0)
    return torch.where(alive, (norm.float().abs() / torch.where(alive, largest, 1.0)).sqrt(), 1.0)
