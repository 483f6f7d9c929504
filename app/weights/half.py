"""A check that weights fit FP16.

Checkpoints made in BF16 may exceed FP16's maximum of 65,504; such a weight would become infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.errors import PlanImpossible

_MOST = torch.finfo(torch.float16).max


def check_half(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Check values that are converted to `dtype`.

    Raises:
        PlanImpossible: `dtype` is FP16 and a value does not fit it.
    """
    if dtype != torch.float16:
        return
    low, high = (float(end) for end in values.aminmax())
    worst = high if high > -low else low  # if a value is NaN, both are NaN
    if not abs(worst) <= _MOST:
        raise PlanImpossible(
            f"{name} holds {worst:g}, and FP16 ends at {_MOST:,.0f}: serve this model in bf16 or fp32 (precision=bf16)."
        )
