"""Energy meter of an NVIDIA device, read from the driver's NVML library; no package is needed.

nvmlDeviceGetTotalEnergyConsumption counts millijoules of the whole board since the driver was loaded (Volta and
newer). Not tested on a device yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from app.hardware.facts import CudaDevice

MILLI = 1e-3
_SUCCESS = 0


class NvmlEnergy:
    """Meter of the energy that the device has used since the meter was opened."""

    source = "nvml"

    def __init__(self, library: Any, handle: ctypes.c_void_p, first: int) -> None:
        self._library, self._handle = library, handle
        self._first = self._last = first

    def joules(self) -> float:
        """Return the joules; the last value if the driver does not answer."""
        told = _millijoules(self._library, self._handle)
        self._last = max(self._last, told or 0)
        return (self._last - self._first) * MILLI

    def close(self) -> None:
        """Shut NVML down."""
        self._library.nvmlShutdown()


def open_nvml(device: CudaDevice, load: Callable[[str], Any] = ctypes.CDLL) -> NvmlEnergy | None:
    """Open the meter; None without a driver, or if the device does not count energy."""
    try:
        library = load("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device.index), ctypes.byref(handle)) == _SUCCESS:
            first = _millijoules(library, handle)
            if first is not None:
                return NvmlEnergy(library, handle, first)
        library.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one that is too old for a function
        pass
    return None


def _millijoules(library: Any, handle: ctypes.c_void_p) -> int | None:
    told = ctypes.c_ulonglong()
    return told.value if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(told)) == _SUCCESS else None
