"""Access to the kernel's files below a replaceable root directory, and parsers of the kernel's small formats.

A file that is absent or unreadable gives None or an empty value, never an exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DIGITS = r"[0-9]{1,20}"  # of a 64-bit number; anything longer is not one that a kernel writes
_MAX_CPUS = 2**13  # the kernel's largest NR_CPUS
_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, slots=True)
class HostFiles:
    """File system of the machine as seen from `root`, with the machine's absolute paths as names."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return the file's text without surrounding white space, or None for any error of /proc and /sys."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return None

    def read_bytes(self, name: str) -> bytes:
        """Return the file's bytes; empty if it cannot be read."""
        try:
            return self.path(name).read_bytes()
        except (OSError, ValueError):
            return b""

    def number(self, name: str) -> int | None:
        """Return the file's only integer, which may be negative, or None if there is none, such as `max`."""
        text = self.text(name)
        return int(text) if text is not None and re.fullmatch(rf"-?{DIGITS}", text) else None

    def names(self, name: str) -> list[str]:
        """Return the sorted names in a directory; empty if there is no such directory."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except (OSError, ValueError):
            return []

    def is_directory(self, name: str) -> bool:
        try:
            return self.path(name).is_dir()
        except (OSError, ValueError):  # a folder above it may not be searched
            return False

    @property
    def is_this_machine(self) -> bool:
        """False for a recorded host; the running kernel must not be asked then."""
        return self.root == Path("/")


def parse_cpu_list(text: str | None) -> tuple[int, ...]:
    """Parse the list format of Linux's cpusets (man 7 cpuset): `0-2,8` is (0, 1, 2, 8)."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        match = re.fullmatch(rf"\s*({DIGITS})(?:-({DIGITS}))?\s*", part)
        if match:
            first = int(match[1])
            cpus.update(range(first, min(int(match[2] or first) + 1, _MAX_CPUS)))
    return tuple(sorted(cpus))


def parse_size(text: str | None) -> int | None:
    """Parse a size into bytes: `32K` (sysfs caches) or `16384 kB` (meminfo)."""
    match = re.fullmatch(rf"({DIGITS})\s*([kKmMgG]?)[bB]?", (text or "").strip())
    return int(match[1]) * _SUFFIXES[match[2].lower()] if match else None


def parse_fields(text: str | None) -> dict[str, str]:
    """Parse `name : value` lines into a mapping; the first value of a repeated name is kept."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields
