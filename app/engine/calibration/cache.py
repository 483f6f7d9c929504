"""Calibrations of earlier starts: measurements of this machine with one checkpoint's shapes, each in one file.

A file is used only while nothing that affects the measurements has changed (`calibration_key`). Several processes may
share the folder. A file that cannot be read or written is no error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Facts, to_json_value
from app.hardware.plan.plan import ServingPlan
from app.hardware.probe import software
from app.settings import Settings, settings_with
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, differences, log_not_kept, open_trusted
from app.weights.program import library_version

log = logging.getLogger(__name__)

FORMAT = 4  # version of what is measured and how: raise it when older measurements would mislead
FOLDER = "calibration"
MAX_BYTES = 2**20  # limit for one file: a longer one was not written by this program
_TABLES = ("decode_seconds", "prefill_seconds", "encode_seconds")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements, the time they were taken (seconds since 1970), and `from_cache`: an earlier start took them."""

    measurements: Measurements
    measured_at: float
    from_cache: bool

    def to_json(self) -> dict[str, Any]:
        age = max(0.0, time.time() - self.measured_at)
        fields: dict[str, Any] = to_json_value(self.measurements)
        return {"from_cache": self.from_cache, "age_seconds": round(age, 1), "measurements": fields}


class CalibrationFile:
    def __init__(self, folder: Path | None, key: Mapping[str, str]) -> None:
        self.key = dict(key)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.file = None if folder is None else folder / FOLDER / f"{digest[:32]}.json"

    def read(self) -> Calibration | None:
        """Return the kept calibration, or None if the machine must be measured."""
        if self.file is None:
            return None
        try:
            return _parsed(_bytes_of(self.file), self.key)
        except FileNotFoundError:
            self._log_other_keys(self.file.parent)
            return None
        except (OSError, FileUnusable) as error:
            log.warning("the calibration in %s cannot be used (%s): measuring again", self.file, error)
            return None

    def _log_other_keys(self, folder: Path) -> None:
        """Log that there are calibrations for another machine or version. They are left for it."""
        others = []
        for file in folder.glob("*.json"):
            with suppress(OSError, FileUnusable, ValueError, KeyError, TypeError, RecursionError):
                others.append(json.loads(_bytes_of(file))["key"])
        same = [key for key in others if isinstance(key, dict) and key.get("shapes") == self.key["shapes"]]
        differ = differences(self.key, same)
        if differ:
            log.info("calibrations of this model in %s differ in %s: they are not used and stay there", folder, differ)

    def write(self, calibration: Calibration) -> None:
        """Write the calibration for the next start, unless the plan could not use it (`fallback`)."""
        found = calibration.measurements
        if self.file is None or found.fallback or not (found.trials or found.single_steps):
            return
        fields = {
            "key": self.key,
            "measured_at": calibration.measured_at,
            "measurements": to_json_value(calibration.measurements),
        }
        try:
            with atomic_write(self.file) as stream:
                stream.write(json.dumps(fields).encode())
        except OSError as error:
            log_not_kept(self.file, "the calibration", error)

    def forget(self, calibration: Calibration) -> None:
        """Remove the file, because the machine no longer performs as measured; leave a newer one of another process."""
        if self.file is None:
            return
        with suppress(OSError, FileUnusable):  # the file is gone already, or this process may not remove it
            if _parsed(_bytes_of(self.file), self.key).measured_at == calibration.measured_at:
                self.file.unlink()
                log.info(
                    "the calibration in %s no longer holds and was removed: the next start measures again", self.file
                )


def calibration_key(facts: Facts, settings: Settings, plan: ServingPlan, shapes: object) -> dict[str, str]:
    """Return everything that decides how long a step takes, as names and values of the calibration's key.

    These are the processor, the part of it that may be used, the model's shapes and the code; never a host name.
    Cores are counted, not named: another process on other cores of the same kind finds the same calibration.
    """
    gpu, allowed = plan.gpu(facts), facts.allowed_cpus
    cores = [(core.kind, core.numa_node, sum(cpu in allowed for cpu in core.cpu_ids)) for core in facts.cores]
    return {
        "format": str(FORMAT),
        "cpu": repr(to_json_value(facts.cpu)),
        "isa": " ".join([*sorted(facts.isa), str(facts.sve_bits)]),
        "caches": repr(to_json_value(facts.caches)),
        "quota": str(facts.cgroup.quota_cores),
        "cores": repr(sorted(core for core in cores if core[2])),
        "huge pages": str(facts.huge_pages.transparent),
        "shapes": repr(shapes),
        "asked": repr({name: getattr(settings, name) for name in settings_with(is_measured=True)}),
        "device": f"{plan.placement.device} {gpu.name if gpu else ''}".strip(),  # equal for GPUs of the same model
        "threads": f"{plan.cpu.threads} {plan.cpu.wait_policy}",
        "version": VERSION,
        "torch": facts.torch.version if facts.torch else "",
        "engine": plan.weights.engine + (library_version("onnxruntime") if plan.weights.engine != "native" else ""),
        "native": f"{software.native_library_hash()} {plan.weights.kernels} {os.environ.get('ARMATURE_ISA', '')}",
    }


def _bytes_of(file: Path) -> bytes:
    descriptor = open_trusted(file)
    try:
        return os.read(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)


def _parsed(text: bytes, key: Mapping[str, str]) -> Calibration:
    """Parse a calibration file. Raises `FileUnusable` if it is none, or has another key."""
    try:
        fields = json.loads(text)
        if fields["key"] != dict(key):
            raise FileUnusable("it was made for another machine, model or version")
        return Calibration(_measurements(fields["measurements"]), float(fields["measured_at"]), from_cache=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileUnusable("it is damaged") from error


def _measurements(fields: Mapping[str, Any]) -> Measurements:
    trials = tuple(_trial(trial) for trial in fields["trials"])
    return Measurements(**{**fields, "trials": trials})


def _trial(fields: Mapping[str, Any]) -> TrialTimes:
    tables = {name: {int(size): float(seconds) for size, seconds in fields[name].items()} for name in _TABLES}
    return TrialTimes(**{**fields, **tables})
