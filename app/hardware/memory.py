"""Memory of a Linux machine: its size, the available bytes, and the page sizes."""

from __future__ import annotations

import os
import re

from app.hardware.facts import HugePages
from app.hardware.files import Files, parse_fields, parse_size

_DEFAULT_PAGE_BYTES = 4096
_STRICT = 2  # Linux Documentation/mm/overcommit-accounting.rst


def sizes(files: Files) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes."""
    return {
        name: size for name, value in parse_fields(files.text("/proc/meminfo")).items() if (size := parse_size(value)) is not None
    }


def available_bytes(meminfo: dict[str, int]) -> int:
    """Return the bytes that can be allocated without swapping: the kernel's estimate if it has one (Linux 3.14)."""
    return meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0))


def commit_left_bytes(files: Files, meminfo: dict[str, int]) -> int | None:
    """Return the bytes that can still be reserved under strict overcommit (mode 2); None in other modes.

    In mode 2 the kernel refuses address space beyond a limit, even if it is never used.
    """
    if files.number("/proc/sys/vm/overcommit_memory") != _STRICT or "CommitLimit" not in meminfo:
        return None
    return max(0, meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0))


def page_bytes(files: Files) -> int:
    """Return the page size, which is 4, 16 or 64 KiB on Arm; a recorded host states it in /proc/self/smaps."""
    if files.is_this_machine:
        return os.sysconf("SC_PAGE_SIZE")
    match = re.search(r"^KernelPageSize:\s*(\d+ kB)$", files.text("/proc/self/smaps") or "", re.MULTILINE)
    return (parse_size(match[1]) if match else None) or _DEFAULT_PAGE_BYTES


def huge_pages(files: Files, meminfo: dict[str, int]) -> HugePages:
    """Return the huge pages.

    The kernel marks the transparent mode with brackets: `always [madvise] never` (Linux
    Documentation/admin-guide/mm/transhuge.rst).
    """
    mode = re.search(r"\[(\w+)\]", files.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return HugePages(
        transparent=mode[1] if mode else None,
        page_bytes=meminfo.get("Hugepagesize", 0),
        total=meminfo.get("HugePages_Total", 0),
        free=meminfo.get("HugePages_Free", 0),
    )
