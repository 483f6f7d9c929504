"""Calibration files: measurements of this machine with one checkpoint's shapes, kept for the next start.

A file is used only while nothing that affects the measurements has changed (see `calibration_key`). Reading one
does not need torch. Several processes may share the folder. If a file cannot be read, the machine is measured
again; if one cannot be written, that is logged.
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

from app.hardware import native_library
from app.hardware.decision import Measurements, Trial
from app.hardware.facts import Facts, plain
from app.hardware.plan import ServingPlan
from app.settings import Settings
from app.version import VERSION
from app.weights.whole_file import FileUnusable, differences, open_ours, replacing, tell_unkept

log = logging.getLogger(__name__)

FORMAT = 3  # version of what is measured and how: raise it when older measurements would mislead
FOLDER = "calibration"
MOST_BYTES = 2**20  # limit for one file: a longer one was not written by this program
# The settings that change the measurements. Memory and request limits do not.
_ASKED = (
    "device precision threads compile max_batch_tokens max_running_seqs max_model_len kv_precision int8_copy numa_node deterministic"
).split()


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements, the time they were taken (seconds since 1970), and `from_cache`: an earlier start took them."""

    measurements: Measurements
    measured_at: float
    from_cache: bool

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `GET /info`: the measurements, their age in seconds, and `from_cache`."""
        age = max(0.0, time.time() - self.measured_at)
        fields: dict[str, Any] = plain(self.measurements)
        return {"from_cache": self.from_cache, "age_seconds": round(age, 1), "measurements": fields}


class Kept:
    """The calibration file of one key, which may or may not exist."""

    def __init__(self, folder: Path | None, key: Mapping[str, str]) -> None:
        """Compute the file's path from `key`. With `folder` None, nothing is read or kept."""
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
            self._tell_of_others(self.file.parent)
            return None
        except (OSError, FileUnusable) as error:
            log.warning("the calibration in %s cannot be used (%s): measuring again", self.file, error)
            return None

    def _tell_of_others(self, folder: Path) -> None:
        """Log that calibrations of these shapes exist for another machine or version.

        They are never used, and they are left for the machine or version that made them.
        """
        others = []
        for file in folder.glob("*.json"):
            with suppress(OSError, FileUnusable, ValueError, KeyError, TypeError, RecursionError):
                others.append(json.loads(_bytes_of(file))["key"])
        same = [key for key in others if isinstance(key, dict) and key.get("shapes") == self.key["shapes"]]
        differ = differences(self.key, same)
        if differ:
            log.info("calibrations of this model in %s differ in %s: they are not used and stay there", folder, differ)

    def keep(self, calibration: Calibration) -> None:
        """Write the calibration for the next start, or log that it cannot be written.

        Measurements that the plan could not use (`fallback`) are not kept.
        """
        if self.file is None or calibration.measurements.fallback:
            return
        fields = {"key": self.key, "measured_at": calibration.measured_at, "measurements": plain(calibration.measurements)}
        try:
            with replacing(self.file) as stream:
                stream.write(json.dumps(fields).encode())
        except OSError as error:
            tell_unkept(self.file, "the calibration", error)

    def forget(self, calibration: Calibration) -> None:
        """Remove the file, because the machine no longer performs as measured: the next start measures again.

        A newer calibration, which another process has written since then, is left in place.
        """
        if self.file is None:
            return
        with suppress(OSError, FileUnusable):  # the file is gone already, or this process may not remove it
            if _parsed(_bytes_of(self.file), self.key).measured_at == calibration.measured_at:
                self.file.unlink()
                log.info("the calibration in %s no longer holds and was removed: the next start measures again", self.file)


def key_of(facts: Facts, settings: Settings, plan: ServingPlan, shapes: object) -> dict[str, str]:
    """Return everything that decides how long a step takes, as names and values of the calibration's key.

    These are the processor, the part of it that may be used, the model's shapes and the code; never a host name.
    Cores are counted, not named: another process on other cores of the same kind finds the same calibration.
    """
    gpu, allowed = plan.gpu(facts), facts.allowed_cpus
    cores = [(core.kind, core.numa_node, sum(cpu in allowed for cpu in core.cpu_ids)) for core in facts.cores]
    return {
        "format": str(FORMAT),
        "cpu": repr(plain(facts.cpu)),
        "isa": " ".join([*sorted(facts.isa), str(facts.sve_bits)]),
        "caches": repr(plain(facts.caches)),
        "quota": str(facts.cgroup.quota_cores),
        "cores": repr(sorted(core for core in cores if core[2])),
        "huge pages": str(facts.huge_pages.transparent),
        "shapes": repr(shapes),
        "asked": repr({name: getattr(settings, name) for name in _ASKED}),
        "device": f"{plan.device.value} {gpu.name if gpu else ''}".strip(),  # equal for GPUs of the same model
        "threads": f"{plan.threads.value} {plan.wait_policy.value}",
        "version": VERSION,
        "torch": facts.torch.version if facts.torch else "",
        "native": f"{native_library.content()} {plan.kernels.value} {os.environ.get('ARMATURE_ISA', '')}",
    }


def _bytes_of(file: Path) -> bytes:
    descriptor = open_ours(file)
    try:
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def _parsed(text: bytes, key: Mapping[str, str]) -> Calibration:
    """Parse a calibration file.

    Raises:
        FileUnusable: The text is not a calibration, or it has another key.
    """
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


def _trial(fields: Mapping[str, Any]) -> Trial:
    tables = {name: {int(size): float(seconds) for size, seconds in fields[name].items()} for name in _TABLES}
    return Trial(**{**fields, **tables})


_TABLES = ("decode_seconds", "prefill_seconds", "encode_seconds")
