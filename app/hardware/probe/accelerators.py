"""NVIDIA GPUs of the machine, listed by nvidia-smi or by the driver's files in /proc, without a CUDA library."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

from app.hardware.facts import CudaDevice
from app.hardware.probe.host_files import DIGITS, HostFiles, parse_fields

CommandRunner = Callable[[list[str]], str | None]

# nvidia-smi knows compute_cap since driver 510. An older one rejects the whole query; then the files in /proc name the
# devices.
_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free", "uuid", "driver_version", "mig.mode.current")
GPU_QUERY = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
GPU_LIST = ["nvidia-smi", "-L"]  # also lists the MIG instances of partitioned GPUs
_GPU_FILES = "/proc/driver/nvidia/gpus"

# A line `  MIG 1g.10gb     Device  0: (UUID: MIG-…)` follows `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)`. The name of
# a profile contains its memory in gigabytes.
_MIG_LISTING = re.compile(
    rf"^GPU ({DIGITS}):|^\s+MIG (\S*?({DIGITS})gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", re.MULTILINE
)
# Lower bound of the share of the gigabytes in a profile's name that an instance has: 1g.24gb of a GB200 has 20.0 GiB,
# 1g.18gb of an H200 has 16.0 (`nvidia-smi mig -lgip` in github.com/NVIDIA/gpu-operator pull 1303 and
# github.com/NVIDIA/mig-parted issue 120).
_PROFILE_MEMORY_SHARE = 0.89


def cuda_devices(files: HostFiles, run: CommandRunner, visible: str | None = None) -> tuple[CudaDevice, ...]:
    """Return the GPUs as nvidia-smi lists them, else as the driver's /proc files do; empty without a driver.

    MIG instances replace their GPU and share its index. `visible` is the value of CUDA_VISIBLE_DEVICES.
    """
    devices = parse_gpu_query(run(GPU_QUERY) or "") or tuple(_from_driver_files(files))
    if any(device.mig is not None for device in devices):
        devices = _with_mig_instances(devices, run(GPU_LIST) or "")
    return _filter_visible(devices, visible)


def _filter_visible(devices: tuple[CudaDevice, ...], visible: str | None) -> tuple[CudaDevice, ...]:
    """Return the devices that CUDA would show, in its order.

    CUDA_VISIBLE_DEVICES lists indexes and UUIDs (`GPU-…`, which may be shortened, or `MIG-…`). CUDA ignores everything
    after the first entry that is neither.
    """
    if visible is None:
        return devices
    found = ([device for device in devices if _matches(device, word.strip())] for word in visible.split(","))
    return tuple(itertools.chain.from_iterable(itertools.takewhile(bool, found)))


def _matches(device: CudaDevice, entry: str) -> bool:
    if entry.startswith(("GPU-", "MIG-")):
        return (device.uuid or "").startswith(entry)
    return entry == str(device.index)


def parse_gpu_query(text: str) -> tuple[CudaDevice, ...]:
    """Parse the output of `GPU_QUERY`: one line for each device, `[N/A]` becomes None."""
    lines = ([part.strip() for part in line.split(",")] for line in text.splitlines())
    return tuple(
        _parse_device(dict(zip(_FIELDS, parts, strict=True)))
        for parts in lines
        if len(parts) == len(_FIELDS) and re.fullmatch(DIGITS, parts[0])
    )


def _parse_device(fields: Mapping[str, str]) -> CudaDevice:
    capability = re.fullmatch(rf"({DIGITS})\.({DIGITS})", fields["compute_cap"])
    return CudaDevice(
        index=int(fields["index"]),
        name=fields["name"],
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        memory_bytes=_mebibytes(fields["memory.total"]),
        free_bytes=_mebibytes(fields["memory.free"]),
        uuid=fields["uuid"] if fields["uuid"].startswith("GPU-") else None,
        driver=fields["driver_version"] if fields["driver_version"][:1].isdecimal() else None,
        mig="" if fields["mig.mode.current"] == "Enabled" else None,
    )


def _mebibytes(word: str) -> int | None:
    return int(word) * 2**20 if re.fullmatch(DIGITS, word) else None


def _with_mig_instances(devices: Iterable[CudaDevice], listed: str) -> tuple[CudaDevice, ...]:
    """Replace each partitioned GPU with its MIG instances; one without instances stays, and cannot serve."""
    instances: dict[int, list[tuple[str, int, str]]] = {}
    number = -1
    for gpu, profile, gigabytes, uuid in _MIG_LISTING.findall(listed):
        if gpu:
            number = int(gpu)
        else:
            instances.setdefault(number, []).append((profile, int(gigabytes), uuid))
    return tuple(
        part
        for device in devices
        for part in (_mig_instances(device, instances.get(device.index, [])) if device.mig is not None else [device])
    )


def _mig_instances(device: CudaDevice, instances: list[tuple[str, int, str]]) -> list[CudaDevice]:
    """Return the MIG instances of a GPU; all of their memory is assumed to be free."""
    return [
        dataclasses.replace(
            device,
            name=f"{device.name} MIG {profile}",
            memory_bytes=int(gigabytes * 10**9 * _PROFILE_MEMORY_SHARE),
            free_bytes=None,
            uuid=uuid,
            mig=profile,
        )
        for profile, gigabytes, uuid in instances
    ] or [device]


def _from_driver_files(files: HostFiles) -> list[CudaDevice]:
    addresses = files.names(_GPU_FILES)
    names = [
        parse_fields(files.text(f"{_GPU_FILES}/{address}/information")).get("Model", "NVIDIA GPU")
        for address in addresses
    ]
    return [CudaDevice(index, name) for index, name in enumerate(names)]
