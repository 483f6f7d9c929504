"""Measurements in processes of their own: each has a level of kernels, a number of threads, a model and a time limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from armature_bench.published.models import VALUE_BYTES, PublishedModel

DEFAULT_SECONDS = 180.0  # time limit of one run
PROCESS_BYTES = 1.5e9  # Python, torch, activations, keys and values
PRECISION_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "auto": 4.0, "int4": 0.6}  # of a weight in memory
STOP_SECONDS = 20.0
_KEPT_VARIABLES = ("ARMATURE_NATIVE_LIBRARY", "ARMATURE_CACHE_DIR")
_PACKAGES = Path(__file__).resolve().parents[3]  # folder from which this `app` package was imported


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One run of `armature bench engine` or `armature bench eager`.

    `threads` and `level` (a level of the native kernels) are None for the plan's choice.
    """

    model: PublishedModel
    precision: str
    bench: Literal["engine", "eager"] = "engine"
    threads: int | None = None
    level: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [self.model.title, self.precision, self.bench if self.bench == "eager" else "", self.level or ""]
        threads = "" if self.threads is None else f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        return ", ".join(word for word in (*words, threads) if word)

    @property
    def memory_bytes(self) -> float:
        """Estimate of the memory that it takes; `bench eager` has a second engine in FP32, and then torch's model."""
        held = PRECISION_BYTES[self.precision] + (PRECISION_BYTES["fp32"] if self.bench == "eager" else 0)
        return PROCESS_BYTES + held * self.model.num_weights

    def command(self, directory: Path, result: Path) -> list[str]:
        """Return the command that writes its JSON object to `result`."""
        threads = () if self.threads is None else (f"--threads={self.threads}",)
        flags = ("--model", str(directory), "--precision", self.precision, *threads, *self.flags)
        # -P: do not import an `app` folder in the current directory.
        return [sys.executable, "-P", "-m", "app", "bench", self.bench, "--json", str(result), *flags]

    def environment(self) -> dict[str, str]:
        """Return the environment: without the operator's settings, so that the figures are of this run's flags alone."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("ARMATURE_") or name in _KEPT_VARIABLES
        }
        path = os.pathsep.join(filter(None, (str(_PACKAGES), kept.get("PYTHONPATH"))))
        level = {} if self.level is None else {"ARMATURE_ISA": self.level}
        return {**kept, "PYTHONPATH": path, "ARMATURE_CALIBRATE": "off", **level}


@dataclass(frozen=True, slots=True)
class RunResult:
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    def seconds(self, name: str) -> float | None:
        """Return the median seconds of a figure in milliseconds, or None if it was not measured."""
        found = self.figures.get(name)
        return None if found is None else float(found["value"]) / 1e3

    def decided(self, name: str) -> Any:
        return self.plan[name]["value"]


class RunFailed(Exception):
    """A run gave no result; the message is a sentence that says why."""


def obstacle(run: PublishedRun, usable_bytes: float, folder: Path) -> str:
    """Return why a run cannot be made here, as the end of a sentence, or an empty text.

    `usable_bytes` is memory that this process can allocate; the model is or will be written to `folder`.
    """
    if run.memory_bytes > usable_bytes:
        return f"it takes {run.memory_bytes / 1e9:.1f} GB of memory, and {usable_bytes / 1e9:.1f} are available"
    if not (folder / run.model.name).exists():
        wanted, free = VALUE_BYTES * run.model.num_weights, shutil.disk_usage(folder).free
        if wanted > 0.95 * free:
            return f"its weights take {wanted / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} are free"
    return ""


def measure_run(run: PublishedRun, directory: Path, seconds: float) -> RunResult:
    """Start the run on the checkpoint in `directory`. Raises `RunFailed` if it fails or takes over `seconds`."""
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place) / "result.json", Path(place) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                run.command(directory, result), env=run.environment(), stdout=subprocess.DEVNULL, stderr=out
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise RunFailed(f"it took longer than {seconds:g} s (--seconds)") from None
            finally:
                _stop(process)
        if status != 0:
            raise RunFailed(
                _last_line(log.read_text(errors="replace").splitlines()) or f"it ended with status {status}"
            )
        written = json.loads(result.read_text(encoding="utf-8"))
    return RunResult({each["name"]: each for each in written["figures"]}, written["details"]["plan"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: after Ctrl-C it was interrupted too and ends by itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip().removesuffix(".") for line in reversed(lines) if line.strip()), "")
