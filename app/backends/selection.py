"""Selection of the backend for the planned device: a row in a table, of which no other row is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from app.backends.base import BaseBackend, DeviceBackend, HostBackend
from app.backends.cpu import CpuBackend
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan

BackendT = TypeVar("BackendT", bound=BaseBackend)
HOST_BACKENDS: Mapping[str, Callable[[torch.dtype], HostBackend]] = {"cpu": CpuBackend}
DTYPE_BY_NAME: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _cuda(dtype: torch.dtype) -> DeviceBackend:
    from app.backends.cuda import CudaBackend

    return CudaBackend(dtype)


def _mps(dtype: torch.dtype) -> DeviceBackend:
    from app.backends.mps import MpsBackend

    return MpsBackend(dtype)


DEVICE_BACKENDS: Mapping[str, Callable[[torch.dtype], DeviceBackend]] = {"cuda": _cuda, "mps": _mps}


def select_backend(plan: ServingPlan) -> BaseBackend:
    """Return the backend of the planned device, not yet configured. Raises `PlanImpossible` if there is none."""
    kinds: Mapping[str, Callable[[torch.dtype], BaseBackend]] = {**HOST_BACKENDS, **DEVICE_BACKENDS}
    return _backend_factory(kinds, plan)(DTYPE_BY_NAME[plan.weights.dtype])


def select_host_backend(plan: ServingPlan) -> HostBackend:
    return _backend_factory(HOST_BACKENDS, plan)(DTYPE_BY_NAME[plan.weights.dtype])


def select_device_backend(plan: ServingPlan) -> DeviceBackend:
    return _backend_factory(DEVICE_BACKENDS, plan)(DTYPE_BY_NAME[plan.weights.dtype])


def _backend_factory(
    rows: Mapping[str, Callable[[torch.dtype], BackendT]], plan: ServingPlan
) -> Callable[[torch.dtype], BackendT]:
    device = plan.placement.device
    if device not in rows:
        raise PlanImpossible(f"There is no backend for device {device!r} here; available: {', '.join(sorted(rows))}.")
    return rows[device]
