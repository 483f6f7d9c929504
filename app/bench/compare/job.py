"""The description of a `bench compare` run: target server, labels of the machine, and path of the result file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.bench.compare.result import SCHEMA
from app.bench.load import Target
from app.bench.stats import MeasurementFailed

POINT_SECONDS = 8.0
_OURS = f'{{"schema":"{SCHEMA.partition("/")[0]}/'.encode()  # the first bytes of a result file of any version


@dataclass(frozen=True, slots=True)
class Place:
    """Labels given to this machine by the operator: report name, price table row, dollars per hour, watts."""

    name: str | None = None
    instance: str | None = None
    hourly_price: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class MachineJob:
    """One `armature bench compare` measurement.

    `seconds` is the duration of each load. If `output` is None, the file name is made from the machine, the model and
    the precision. `version` is the version of this program.
    """

    target: Target
    place: Place
    version: str
    output: Path | None = None
    seconds: float = POINT_SECONDS
    seed: int = 0


def place_of(job: MachineJob, info: Mapping[str, Any]) -> Place:
    """Return the labels of the machine, completed from the server's `/info` where the operator gave none.

    A machine without a name gets the name of its processor.
    """
    place, told = job.place, info.get("place") or {}
    return Place(
        place.name or place.instance or _processor(info),
        place.instance,
        place.hourly_price or told.get("hourly_price"),
        place.watts or told.get("watts"),
    )


def output_of(job: MachineJob, info: Mapping[str, Any]) -> Path:
    """Return the path of the result file. An existing file is replaced only if it is a result file.

    Raises:
        MeasurementFailed: The path cannot be written, or another kind of file exists there.
    """
    path = job.output
    if path is None:
        words = (place_of(job, info).name, info["model"]["name"], info["plan"]["precision"]["value"])
        path = Path("-".join(["armature", *(_slug(str(word)) for word in words)]) + ".json")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasurementFailed(f"{path} cannot be written: --output must name a file in an existing, writable folder")
    if path.exists() and path.stat().st_size and not _is_ours(path):
        raise MeasurementFailed(f"{path} exists and is not a result file, so it is not replaced; give another --output")
    return path


def is_local(url: str, info: Mapping[str, Any]) -> bool:
    """Return whether the server shares this machine's cores: it has a loopback address and the same kernel."""
    host = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    kernel = (info.get("facts") or {}).get("kernel")
    return loopback and kernel in (None, os.uname().release)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_OURS)) == _OURS
    except OSError:
        return False


def _processor(info: Mapping[str, Any]) -> str:
    cpu = (info.get("facts") or {}).get("cpu") or {}
    name = str(cpu.get("product") or cpu.get("name") or "machine")
    return " ".join(re.sub(r"\((R|TM|tm)\)|\bCPU\b|\bProcessor\b|@.*", " ", name).split()) or "machine"


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.") or "unnamed"
