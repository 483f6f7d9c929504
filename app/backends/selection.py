"""From the plan's device to the backend that serves it: one table, one row a kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from app.backends.base import Backend
from app.backends.cpu import CpuBackend
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan

BACKENDS: Mapping[str, Callable[[torch.dtype], Backend]] = {"cpu": CpuBackend}
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def select_backend(plan: ServingPlan) -> Backend:
    """The backend of the plan's device, not yet configured. Raises `PlanImpossible` where this version has none."""
    device = plan.device.value
    if device not in BACKENDS:
        raise PlanImpossible(f"There is no backend for device {device!r}; this version serves on: {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[device](DTYPES[plan.dtype.value])
