"""NVIDIA GPUs of the machine, listed by nvidia-smi or by the driver's files in /proc.

Neither torch nor a CUDA library is loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

from app.hardware.facts import CudaDevice
from app.hardware.files import Files, parse_fields

Run = Callable[[list[str]], str | None]

# nvidia-smi knows compute_cap since driver 510. An older one rejects the whole query; then the files in /proc name the devices.
_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free", "uuid", "driver_version", "mig.mode.current")
GPU_QUERY = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
GPU_LIST = ["nvidia-smi", "-L"]  # also lists the MIG instances of partitioned GPUs
_GPU_FILES = "/proc/driver/nvidia/gpus"

# A line `  MIG 1g.10gb     Device  0: (UUID: MIG-…)` follows `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)`. The name of a profile
# contains its memory in gigabytes.
_LISTED = re.compile(r"^GPU (\d+):|^\s+MIG (\S*?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", re.MULTILINE)
# Lower bound of the share of the gigabytes in a profile's name that an instance has: 1g.24gb of a GB200 has 20.0 GiB, 1g.18gb of an
# H200 has 16.0
# (`nvidia-smi mig -lgip` in github.com/NVIDIA/gpu-operator pull 1303 and github.com/NVIDIA/mig-parted issue 120).
_OF_PROFILE = 0.89


def cuda_devices(files: Files, run: Run, visible: str | None = None) -> tuple[CudaDevice, ...]:
    """Return the GPUs as nvidia-smi lists them, else as the driver's /proc files do; empty without a driver.

    A GPU that is partitioned by MIG is replaced by its instances, which share its index. `visible` is the value of
    CUDA_VISIBLE_DEVICES.
    """
    devices = parse_gpu_query(run(GPU_QUERY) or "") or tuple(_from_driver_files(files))
    if any(device.mig is not None for device in devices):
        devices = _divided(devices, run(GPU_LIST) or "")
    return _visible(devices, visible)


def _visible(devices: tuple[CudaDevice, ...], visible: str | None) -> tuple[CudaDevice, ...]:
    """Return the devices that CUDA would show, in its order.

    CUDA_VISIBLE_DEVICES lists indexes and UUIDs (`GPU-…`, which may be shortened, or `MIG-…`). CUDA ignores
    everything after the first entry that is neither.
    """
    if visible is None:
        return devices
    found = ([device for device in devices if _is_meant(device, word.strip())] for word in visible.split(","))
    return tuple(itertools.chain.from_iterable(itertools.takewhile(bool, found)))


def _is_meant(device: CudaDevice, word: str) -> bool:
    if word.startswith(("GPU-", "MIG-")):
        return (device.uuid or "").startswith(word)
    return word == str(device.index)


def parse_gpu_query(text: str) -> tuple[CudaDevice, ...]:
    """Parse the output of `GPU_QUERY`: one line for each device.

    A value that the driver cannot provide (`[N/A]`, such as the size of shared memory) becomes None.
    """
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
    """Replace each partitioned GPU with its MIG instances; one without instances stays, and cannot serve."""
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
    """Return the MIG instances of a GPU.

    The driver does not report the free memory of an instance, so all of it is assumed to be free.
    """
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
