"""A CPU quota for processes of a comparison: a control group of either version, made and removed by who has the right to."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000
REMOVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Enter it by writing a process id to `procs`."""

    folder: Path
    version: int

    @classmethod
    def make(cls, name: str, cores: float, cgroups: Path = CGROUPS) -> Quota:
        """Raises `SystemExit` where this system or this user cannot."""
        version, top = (1, cgroups / "cpu") if (cgroups / "cpu").is_dir() else (2, cgroups)
        folder, microseconds = top / f"armature-{os.getpid()}-{name}", round(cores * PERIOD_MICROSECONDS)
        try:
            folder.mkdir()
            if version == 1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (folder / "cpu.cfs_quota_us").write_text(str(microseconds))
            else:
                (folder / "cpu.max").write_text(f"{microseconds} {PERIOD_MICROSECONDS}")
        except OSError as error:
            raise SystemExit(f"no control group with a quota can be made: {error}") from None
        return cls(folder, version)

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    def throttled_seconds(self) -> float:
        """For how long threads that wanted to run were kept from it so far, added up over CPUs."""
        counts = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(counts["throttled_time"]) / 1e9 if self.version == 1 else int(counts["throttled_usec"]) / 1e6

    def remove(self) -> None:
        """Once its processes have ended, which the kernel may take a moment to notice."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.folder.rmdir()
