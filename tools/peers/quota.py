"""A CPU quota for processes of a comparison: a control group of version 1 or 2."""

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
    """A control group with a quota. A process joins it by writing its id to `procs`."""

    folder: Path

    @classmethod
    def make(cls, name: str, cores: float, cgroups: Path = CGROUPS) -> Quota:
        """Create the control group. Raises `SystemExit` if the system or the user does not allow it."""
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
            raise SystemExit(f"cannot create a control group with a quota: {error}") from None
        return cls(folder)

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    def remove(self) -> None:
        """Remove the group after its processes have ended, which the kernel may notice late."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.folder.rmdir()
