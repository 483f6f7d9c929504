"""What FP16 cannot hold: checkpoints made in BF16 may reach beyond 65,504, and a weight that overflowed would be infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from app.errors import PlanImpossible

_MOST = torch.finfo(torch.float16).max


def check_half(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raises `PlanImpossible` where `dtype` is FP16 and one of these is no number of it."""
    if dtype != torch.float16:
        return
    low, high = (float(end) for end in values.aminmax())
    worst = high if high > -low else low  # NaN is neither: then it is both
    if not abs(worst) <= _MOST:
        raise PlanImpossible(
            f"{name} holds {worst:g}, and FP16 ends at {_MOST:,.0f}: serve this model in bf16 or fp32 (precision=bf16)."
        )
