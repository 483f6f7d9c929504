"""Selection of the backend for the planned device.

Each kind of device has one row in a table. Backends of other kinds of device are not imported.
"""

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
    """Return the backend of the planned device, not yet configured.

    Raises:
        PlanImpossible: this version has no backend for the device.
    """
    kinds: Mapping[str, Callable[[torch.dtype], Device]] = {**PROCESSORS, **DEVICES}
    return _row(kinds, plan)(DTYPES[plan.dtype.value])


def processor(plan: ServingPlan) -> Backend:
    """Return the backend for a plan that serves on a processor."""
    return _row(PROCESSORS, plan)(DTYPES[plan.dtype.value])


def device_backend(plan: ServingPlan) -> DeviceBackend:
    """Return the backend for a plan that serves on a device with separate memory and a queue."""
    return _row(DEVICES, plan)(DTYPES[plan.dtype.value])


def _row(rows: Mapping[str, Callable[[torch.dtype], Kind]], plan: ServingPlan) -> Callable[[torch.dtype], Kind]:
    device = plan.device.value
    if device not in rows:
        raise PlanImpossible(f"There is no backend for device {device!r} here; available: {', '.join(sorted(rows))}.")
    return rows[device]
