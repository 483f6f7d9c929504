"""Which NVIDIA devices there are, asked of the driver's own tool and files: torch is not imported and no library is loaded for it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

from app.hardware.facts import CudaDevice
from app.hardware.files import Files, parse_fields

Run = Callable[[list[str]], str | None]

# compute_cap is known to nvidia-smi since driver 510; where the query fails as a whole, /proc still names the devices.
_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free", "uuid", "driver_version", "mig.mode.current")
GPU_QUERY = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
GPU_LIST = ["nvidia-smi", "-L"]  # names the instances of divided GPUs too
_GPU_FILES = "/proc/driver/nvidia/gpus"

# `  MIG 1g.10gb     Device  0: (UUID: MIG-…)` below `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)`; a profile's name has its memory.
_LISTED = re.compile(r"^GPU (\d+):|^\s+MIG (\S*?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", re.MULTILINE)
# What an instance has of the gigabytes in its profile's name, at the least: 1g.24gb of a GB200 20.0 GiB, 1g.18gb of an H200 16.0
# (`nvidia-smi mig -lgip` in github.com/NVIDIA/gpu-operator pull 1303 and github.com/NVIDIA/mig-parted issue 120).
_OF_PROFILE = 0.89


def cuda_devices(files: Files, run: Run, visible: str | None = None) -> tuple[CudaDevice, ...]:
    """As nvidia-smi lists them, else as the driver's /proc files do; none where there is no driver. `visible`: CUDA_VISIBLE_DEVICES.

    A divided GPU (MIG) stands there as its instances, each under its number.
    """
    devices = parse_gpu_query(run(GPU_QUERY) or "") or tuple(_from_driver_files(files))
    if any(device.mig is not None for device in devices):
        devices = _divided(devices, run(GPU_LIST) or "")
    return _visible(devices, visible)


def _visible(devices: tuple[CudaDevice, ...], visible: str | None) -> tuple[CudaDevice, ...]:
    """Those that CUDA would show, in its order: numbers and names (`GPU-…` may be cut short, `MIG-…`) up to the first that is neither."""
    if visible is None:
        return devices
    found = ([device for device in devices if _is_meant(device, word.strip())] for word in visible.split(","))
    return tuple(itertools.chain.from_iterable(itertools.takewhile(bool, found)))


def _is_meant(device: CudaDevice, word: str) -> bool:
    if word.startswith(("GPU-", "MIG-")):
        return (device.uuid or "").startswith(word)
    return word == str(device.index)


def parse_gpu_query(text: str) -> tuple[CudaDevice, ...]:
    """A line a device; a value that the driver cannot give (`[N/A]`, as the size of shared memory) is None."""
    lines = ([part.strip() for part in line.split(",")] for line in text.splitlines())
    return tuple(
        _device(dict(zip(_FIELDS, parts, strict=True))) for parts in lines if len(parts) == len(_FIELDS) and parts[0].isdecimal()
    )


def _device(told: Mapping[str, str]) -> CudaDevice:
    capability = re.fullmatch(r"(\d+)\.(\d+)", told["compute_cap"])
    return CudaDevice(
        index=int(told["index"]),
        name=told["name"],
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        memory_bytes=_mebibytes(told["memory.total"]),
        free_bytes=_mebibytes(told["memory.free"]),
        uuid=told["uuid"] if told["uuid"].startswith("GPU-") else None,
        driver=told["driver_version"] if told["driver_version"][:1].isdecimal() else None,
        mig="" if told["mig.mode.current"] == "Enabled" else None,
    )


def _mebibytes(word: str) -> int | None:
    return int(word) * 2**20 if word.isdecimal() else None


def _divided(devices: Iterable[CudaDevice], listed: str) -> tuple[CudaDevice, ...]:
    """With instances in place of the GPUs that are divided into them; one that has none stays, and nothing can serve on it."""
    instances: dict[int, list[tuple[str, int, str]]] = {}
    number = -1
    for gpu, profile, gigabytes, uuid in _LISTED.findall(listed):
        if gpu:
            number = int(gpu)
        else:
            instances.setdefault(number, []).append((profile, int(gigabytes), uuid))
    return tuple(
        part
        for device in devices
        for part in (_parts(device, instances.get(device.index, [])) if device.mig is not None else [device])
    )


def _parts(device: CudaDevice, instances: list[tuple[str, int, str]]) -> list[CudaDevice]:
    """Nobody tells how much of an instance is free: it is taken for whole."""
    return [
        dataclasses.replace(
            device,
            name=f"{device.name} MIG {profile}",
            memory_bytes=int(gigabytes * 10**9 * _OF_PROFILE),
            free_bytes=None,
            uuid=uuid,
            mig=profile,
        )
        for profile, gigabytes, uuid in instances
    ] or [device]


def _from_driver_files(files: Files) -> list[CudaDevice]:
    addresses = files.names(_GPU_FILES)
    names = [parse_fields(files.text(f"{_GPU_FILES}/{address}/information")).get("Model", "NVIDIA GPU") for address in addresses]
    return [CudaDevice(index, name) for index, name in enumerate(names)]
