"""Limits of this process's control group on Linux, with the limits of all its ancestors: the tightest ones apply.

Supports cgroup v1, v2, and both at once. Formats: Linux Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/*.rst, man 7 cgroups, man 5 proc_pid_mountinfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from app.hardware.facts import Cgroup
from app.hardware.probe.host_files import DIGITS, HostFiles, parse_cpu_list

# cgroup v1 reports "no limit" as the largest multiple of the page size below 2^63. No machine has an exbibyte.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """Mounted cgroup file system: the part `top` of the hierarchy at `point`; v2 has no `controllers`."""

    top: str
    point: str
    version: Literal[1, 2]
    controllers: frozenset[str]


def read_cgroup(files: HostFiles) -> Cgroup:
    mounts, groups = (
        parse_mounts(files.text("/proc/self/mountinfo") or ""),
        parse_groups(files.text("/proc/self/cgroup") or ""),
    )
    memory = list(_memory_limits(files, mounts, groups))
    limits = [limit for limit, _ in memory]
    versions = [mount.version for name in ("cpu", "memory") if (mount := _find_mount(mounts, groups, name))]
    return Cgroup(
        version=min(versions, default=0),
        quota_cores=min((quota for quota, _ in _quotas(files, mounts, groups)), default=None),
        cpuset=_cpuset(files, mounts, groups),
        memory_limit_bytes=min(limits, default=None),
        memory_available_bytes=min((max(0, limit - used) for limit, used in memory), default=None),
    )


def parse_mounts(text: str) -> list[CgroupMount]:
    """Return the cgroup mounts in mountinfo: `id parent device top point options [tags] - type source options`."""
    found = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if dash and len(fields) >= 5 and kind and kind[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(kind[2].split(",")) if len(kind) > 2 else frozenset()
            found.append(
                CgroupMount(_unescape(fields[3]), _unescape(fields[4]), 2 if kind[0] == "cgroup2" else 1, controllers)
            )
    return found


def parse_groups(text: str) -> dict[str, str]:
    """Return this process's group for each controller of `id:controllers:path` lines; v2's key is empty."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def _find_mount(mounts: list[CgroupMount], groups: dict[str, str], controller: str) -> CgroupMount | None:
    """Return the mount of a controller, which belongs to one hierarchy only: v1 if it is mounted there, else v2."""
    first = next((mount for mount in mounts if mount.version == 1 and controller in mount.controllers), None)
    if first is not None and controller in groups:
        return first
    return next((mount for mount in mounts if mount.version == 2 and "" in groups), None)


def _directories(
    files: HostFiles, mounts: list[CgroupMount], groups: dict[str, str], controller: str
) -> Iterator[tuple[int, str]]:
    """Yield the hierarchy's version and the directory of this process's group, then of each mounted ancestor."""
    mount = _find_mount(mounts, groups, controller)
    if mount is None:
        return
    group = groups[controller if mount.version == 1 else ""]
    inside = PurePosixPath(group)
    if inside.is_relative_to(mount.top):
        inside = PurePosixPath("/") / inside.relative_to(mount.top)
    # A container may see only its part of the hierarchy while the path names more of it. Then the mount point is the
    # group.
    if ".." in inside.parts or not files.is_directory(mount.point + str(inside)):
        inside = PurePosixPath("/")
    for directory in (inside, *inside.parents):
        yield mount.version, (mount.point + str(directory)).rstrip("/")


def find_cpu_stat(files: HostFiles) -> Path | None:
    """Return the `cpu.stat` of the group with the tightest CPU quota, with throttled time; None without."""
    mounts, groups = (
        parse_mounts(files.text("/proc/self/mountinfo") or ""),
        parse_groups(files.text("/proc/self/cgroup") or ""),
    )
    tightest = min(_quotas(files, mounts, groups), default=None)
    return None if tightest is None else files.path(f"{tightest[1]}/cpu.stat")


def _quotas(files: HostFiles, mounts: list[CgroupMount], groups: dict[str, str]) -> Iterator[tuple[float, str]]:
    for version, directory in _directories(files, mounts, groups, "cpu"):
        if version == 2:
            quota = parse_cpu_max(files.text(f"{directory}/cpu.max") or "")
        else:
            quota = _quota_cores(
                files.number(f"{directory}/cpu.cfs_quota_us"), files.number(f"{directory}/cpu.cfs_period_us")
            )
        if quota is not None:
            yield quota, directory


def parse_cpu_max(text: str) -> float | None:
    """Parse `cpu.max` into cores: `50000 100000` is half a core, `max 100000` is no limit (None)."""
    parts = text.split()
    if not parts or not re.fullmatch(DIGITS, parts[0]):
        return None
    period = (
        int(parts[1]) if len(parts) > 1 and re.fullmatch(DIGITS, parts[1]) else 100_000
    )  # microseconds, the kernel's default
    return _quota_cores(int(parts[0]), period)


def _quota_cores(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota is not None and quota > 0 and period else None


def _cpuset(files: HostFiles, mounts: list[CgroupMount], groups: dict[str, str]) -> tuple[int, ...] | None:
    """Return the effective CPUs of the nearest level that states them; ancestors' limits are already included."""
    for version, directory in _directories(files, mounts, groups, "cpuset"):
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        for name in names:
            if cpus := parse_cpu_list(files.text(f"{directory}/{name}")):
                return cpus
    return None


def _memory_limits(files: HostFiles, mounts: list[CgroupMount], groups: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be dropped) of every level with `memory.max` or `memory.high`."""
    for version, directory in _directories(files, mounts, groups, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [
            limit for name in names if (limit := files.number(f"{directory}/{name}")) is not None and limit < _NO_LIMIT
        ]
        if limits:
            used = files.number(f"{directory}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}") or 0
            yield min(limits), max(0, used - _page_cache_bytes(files, directory, version))


def _page_cache_bytes(files: HostFiles, directory: str, version: int) -> int:
    """Return the bytes of the group's page cache, which count as used but are freed on demand."""
    prefix = "" if version == 2 else "total_"
    text = files.text(f"{directory}/memory.stat") or ""
    return sum(int(count) for count in re.findall(rf"^{prefix}(?:in)?active_file ({DIGITS})$", text, re.MULTILINE))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
