"""Channels made alike before weights are rounded: a norm's weight divided by t, the columns it feeds multiplied by t, is the same function.

Large models keep some channels of a norm tens of times larger than others, with small weights behind them. One scale a row of activations,
and one a group of weights, then have room for those alone. `t` undoes that, whatever the factor: it depends on both sides alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def column_maxima(parts: Iterable[Tensor], columns: int, device: torch.device | None = None) -> Tensor:
    """The largest magnitude of each input, FP32 [in], over the rows [n, in] of all parts, which lie on that device."""
    largest = torch.zeros(columns, device=device)
    for rows in parts:
        low, high = rows.aminmax(dim=0)
        torch.maximum(largest, torch.maximum(high, -low).float(), out=largest)
    return largest


def gauge(norm: Tensor, largest: Tensor) -> Tensor:
    """t [in] for a norm's weight and its columns' `column_maxima`: both become the root of their product, up to sign.

    A channel that is zero on either side says nothing of the other, and stays.
    """
    alive = (norm != 0) & (largest > 0)
    return torch.where(alive, (norm.float().abs() / torch.where(alive, largest, 1.0)).sqrt(), 1.0)
