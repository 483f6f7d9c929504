"""What is to be measured, what the operator says of the machine, and where the result goes."""

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
_OURS = f'{{"schema":"{SCHEMA.partition("/")[0]}/'.encode()  # how a result file of any version begins


@dataclass(frozen=True, slots=True)
class Place:
    """What the operator says of this machine: its name in reports, its row of the price table, dollars an hour, watts."""

    name: str | None = None
    instance: str | None = None
    hourly_price: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class MachineJob:
    """`seconds`: for which each load is sent. `output` None: a name is made of what was measured. `version`: this program's."""

    target: Target
    place: Place
    version: str
    output: Path | None = None
    seconds: float = POINT_SECONDS
    seed: int = 0


def place_of(job: MachineJob, info: Mapping[str, Any]) -> Place:
    """Whole: where the operator says nothing, the server does. A machine without a name is called by its processor."""
    place, told = job.place, info.get("place") or {}
    return Place(
        place.name or place.instance or _processor(info),
        place.instance,
        place.hourly_price or told.get("hourly_price"),
        place.watts or told.get("watts"),
    )


def output_of(job: MachineJob, info: Mapping[str, Any]) -> Path:
    """Where the result goes. Raises `MeasurementFailed` where that is no place for it: only a result file is replaced by another."""
    path = job.output
    if path is None:
        words = (place_of(job, info).name, info["model"]["name"], info["plan"]["precision"]["value"])
        path = Path("-".join(["armature", *(_slug(str(word)) for word in words)]) + ".json")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasurementFailed(
            f"{path} cannot be written: --output names a file in a folder that is there and can be written to"
        )
    if path.exists() and path.stat().st_size and not _is_ours(path):
        raise MeasurementFailed(f"{path} is there and no result file: it is not replaced; name another --output")
    return path


def is_local(url: str, info: Mapping[str, Any]) -> bool:
    """Whether that server shares this machine's cores: it has a loopback address and the same kernel."""
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
