"""How much memory a Linux machine has, how much of it may be taken now, and in what sizes of page."""

from __future__ import annotations

import os
import re

from app.hardware.facts import HugePages
from app.hardware.files import Files, parse_fields, parse_size

_DEFAULT_PAGE_BYTES = 4096
_STRICT = 2  # Linux Documentation/mm/overcommit-accounting.rst


def sizes(files: Files) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return {
        name: size for name, value in parse_fields(files.text("/proc/meminfo")).items() if (size := parse_size(value)) is not None
    }


def available_bytes(meminfo: dict[str, int]) -> int:
    """What may be taken without swapping: the kernel's own estimate where it makes one (Linux 3.14)."""
    return meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0))


def commit_left_bytes(files: Files, meminfo: dict[str, int]) -> int | None:
    """Under strict overcommit (mode 2) address space is refused beyond a limit, taken or not; else None."""
    if files.number("/proc/sys/vm/overcommit_memory") != _STRICT or "CommitLimit" not in meminfo:
        return None
    return max(0, meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0))


def page_bytes(files: Files) -> int:
    """Arm kernels come with pages of 4, 16 and 64 KiB; a recorded host states its own in /proc/self/smaps."""
    if files.is_this_machine:
        return os.sysconf("SC_PAGE_SIZE")
    match = re.search(r"^KernelPageSize:\s*(\d+ kB)$", files.text("/proc/self/smaps") or "", re.MULTILINE)
    return (parse_size(match[1]) if match else None) or _DEFAULT_PAGE_BYTES


def huge_pages(files: Files, meminfo: dict[str, int]) -> HugePages:
    """`always [madvise] never`: the kernel marks its mode with brackets (Linux Documentation/admin-guide/mm/transhuge.rst)."""
    mode = re.search(r"\[(\w+)\]", files.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return HugePages(
        transparent=mode[1] if mode else None,
        page_bytes=meminfo.get("Hugepagesize", 0),
        total=meminfo.get("HugePages_Total", 0),
        free=meminfo.get("HugePages_Free", 0),
    )
