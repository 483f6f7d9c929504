"""Which NVIDIA devices there are, asked of the driver's own tool and files: torch is not imported and no library is loaded for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from app.hardware.facts import CudaDevice
from app.hardware.files import Files, parse_fields

Run = Callable[[list[str]], str | None]

# compute_cap is known to nvidia-smi since driver 510; where the query fails as a whole, /proc still names the devices.
GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
_GPU_FILES = "/proc/driver/nvidia/gpus"


def cuda_devices(files: Files, run: Run, visible: str | None = None) -> tuple[CudaDevice, ...]:
    """As nvidia-smi lists them, else as the driver's /proc files do; none where there is no driver. `visible`: CUDA_VISIBLE_DEVICES."""
    return _visible(parse_gpu_query(run(GPU_QUERY) or "") or tuple(_from_driver_files(files)), visible)


def _visible(devices: tuple[CudaDevice, ...], visible: str | None) -> tuple[CudaDevice, ...]:
    """Those that CUDA would show, in its order: numbers up to the first that is none. Names of devices (GPU-…, MIG-…) are not looked up."""
    words = [word.strip() for word in (visible or "").split(",")]
    if visible is None or any(word.startswith(("GPU-", "MIG-")) for word in words):
        return devices
    known = {str(device.index): device for device in devices}
    return tuple(known[word] for word in itertools.takewhile(known.__contains__, words))


def parse_gpu_query(text: str) -> tuple[CudaDevice, ...]:
    """Lines of `index, name, capability, MiB`; a value the driver cannot give (`[N/A]`, as unified memory's size) is None."""
    devices = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdecimal():
            capability = re.fullmatch(r"(\d+)\.(\d+)", parts[2])
            devices.append(
                CudaDevice(
                    index=int(parts[0]),
                    name=parts[1],
                    capability=(int(capability[1]), int(capability[2])) if capability else None,
                    memory_bytes=int(parts[3]) * 2**20 if parts[3].isdecimal() else None,
                )
            )
    return tuple(devices)


def _from_driver_files(files: Files) -> list[CudaDevice]:
    addresses = files.names(_GPU_FILES)
    names = [parse_fields(files.text(f"{_GPU_FILES}/{address}/information")).get("Model", "NVIDIA GPU") for address in addresses]
    return [CudaDevice(index, name) for index, name in enumerate(names)]
