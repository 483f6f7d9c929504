"""Reads the kernel's files below a root directory that tests can replace; what is absent or unreadable is None, never an exception.

Parsers of the kernel's small formats stand here too; what the values mean is the business of those who ask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, slots=True)
class Files:
    """The machine's file system as seen from `root`. Names are absolute paths of the machine: `/proc/cpuinfo`."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """The file's text without surrounding white space. Files of /proc and /sys may fail in many ways: all mean unknown."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return None

    def octets(self, name: str) -> bytes:
        try:
            return self.path(name).read_bytes()
        except OSError:
            return b""

    def number(self, name: str) -> int | None:
        """The file's only integer, or None: `max` and `-1` are for the caller to know."""
        text = self.text(name)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def names(self, name: str) -> list[str]:
        """Entries of a directory, sorted; none where there is no such directory."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []

    def is_directory(self, name: str) -> bool:
        return self.path(name).is_dir()

    @property
    def is_this_machine(self) -> bool:
        """False for a recorded host: then nothing may be asked of the running kernel."""
        return self.root == Path("/")


def parse_cpu_list(text: str | None) -> tuple[int, ...]:
    """`0-2,8` is (0, 1, 2, 8): the list format of Linux's cpusets (man 7 cpuset); nonsense is left out."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match:
            first = int(match[1])
            cpus.update(range(first, int(match[2] or first) + 1))
    return tuple(sorted(cpus))


def parse_size(text: str | None) -> int | None:
    """`32K` (sysfs caches) and `16384 kB` (meminfo) in bytes."""
    match = re.fullmatch(r"(\d+)\s*([kKmMgG]?)[bB]?", (text or "").strip())
    return int(match[1]) * _SUFFIXES[match[2].lower()] if match else None


def parse_fields(text: str | None) -> dict[str, str]:
    """`name : value` lines as a mapping; the first of a repeated name stays."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields
