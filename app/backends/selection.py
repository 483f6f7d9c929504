"""From the plan's device to the backend that serves it: a row a kind of device. What a host does not serve on is not imported there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from app.backends.base import Backend, Device, DeviceBackend
from app.backends.cpu import CpuBackend
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan

Kind = TypeVar("Kind", bound=Device)


def _cuda(dtype: torch.dtype) -> DeviceBackend:
    from app.backends.cuda import CudaBackend

    return CudaBackend(dtype)


def _mps(dtype: torch.dtype) -> DeviceBackend:
    from app.backends.mps import MpsBackend

    return MpsBackend(dtype)


PROCESSORS: Mapping[str, Callable[[torch.dtype], Backend]] = {"cpu": CpuBackend}
DEVICES: Mapping[str, Callable[[torch.dtype], DeviceBackend]] = {"cuda": _cuda, "mps": _mps}
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_backend(plan: ServingPlan) -> Device:
    """The backend of the plan's device, not yet configured. Raises `PlanImpossible` where this version has none."""
    kinds: Mapping[str, Callable[[torch.dtype], Device]] = {**PROCESSORS, **DEVICES}
    return _row(kinds, plan)(DTYPES[plan.dtype.value])


def processor(plan: ServingPlan) -> Backend:
    """Of a plan that serves on a processor."""
    return _row(PROCESSORS, plan)(DTYPES[plan.dtype.value])


def device_backend(plan: ServingPlan) -> DeviceBackend:
    """Of a plan that serves on a device with memory and a queue of its own."""
    return _row(DEVICES, plan)(DTYPES[plan.dtype.value])


def _row(rows: Mapping[str, Callable[[torch.dtype], Kind]], plan: ServingPlan) -> Callable[[torch.dtype], Kind]:
    device = plan.device.value
    if device not in rows:
        raise PlanImpossible(f"There is no backend for device {device!r} here; what serves: {', '.join(sorted(rows))}.")
    return rows[device]
