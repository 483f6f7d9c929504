"""llama.cpp as a peer of `armature bench quality`: its own formats of the same weights, on the same windows of tokens.

The checkpoint is written as a GGUF file without rounding. llama.cpp quantizes that file itself, in a process of its own
(`llama_cpp_process.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from app.weights.checkpoint import Checkpoint
from armature_bench.console import MeasurementFailed
from armature_bench.engine import llama_cpp_process
from armature_bench.engine.gguf_file import require_convertible, require_plain, write_gguf

# Our names of llama.cpp's formats, and the constants of llama-cpp-python. The first is the file as it was written: if
# its ratio is not 1, the two engines do not compute the same, and the others cannot be compared.
FORMATS: Mapping[str, str | None] = {
    "llama.cpp as stored": None,
    "llama.cpp Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "llama.cpp Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "llama.cpp Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "llama.cpp Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
}
_REMEDY = (
    "pip install gguf llama-cpp-python brings them (the second is compiled, which takes some minutes); "
    "--peer-python PYTHON names another environment's interpreter for the second."
)
_LAST_LINES = 5  # of llama.cpp's messages, quoted when it fails


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """What the process reports: the bytes of a format's file, or the results of its next window."""

    name: str
    file_bytes: int = 0
    nats: float = 0.0
    likeliest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LlamaCppPeer:
    python: str = sys.executable

    def require(self, checkpoint: Checkpoint) -> None:
        """Check everything that a comparison needs, before minutes are spent on our own precisions.

        Raises `MeasurementFailed` if a package or disk space is missing, and `CheckpointInvalid` if the model cannot be
        written as GGUF.
        """
        require_convertible(checkpoint.decoder)
        require_plain(checkpoint)
        if find_spec("gguf") is None:
            raise MeasurementFailed(f"--peer llama.cpp needs the packages gguf and llama-cpp-python: {_REMEDY}")
        command = [self.python, "-c", "import llama_cpp"]
        try:
            found = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            raise MeasurementFailed(f"--peer-python {self.python}: {error.strerror}") from error
        if found.returncode != 0:
            reason = (found.stderr.strip().splitlines() or [f"status {found.returncode}"])[-1]
            raise MeasurementFailed(
                f"--peer llama.cpp: {self.python} has no working llama-cpp-python ({reason}): {_REMEDY}"
            )
        needed = 2 * sum(entry.nbytes for entry in checkpoint.tensors.values())
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < needed:
            raise MeasurementFailed(
                f"--peer llama.cpp writes {needed / 1e9:.1f} GB of temporary files, but {tempfile.gettempdir()} has "
                f"{free / 1e9:.1f} GB: set TMPDIR to a larger folder"
            )

    def read(self, checkpoint: Checkpoint, windows: list[list[int]], threads: int) -> Generator[PeerEvent, None, None]:
        """Write the model for llama.cpp and yield the results of each of `FORMATS`.

        Raises a `MeasurementFailed` with llama.cpp's last lines if it failed.
        """
        with tempfile.TemporaryDirectory(prefix="armature-llama-cpp-") as folder, tempfile.TemporaryFile("w+") as log:
            source, job = Path(folder) / "stored.gguf", Path(folder) / "job.json"
            write_gguf(checkpoint, source)
            content = {"source": str(source), "formats": dict(FORMATS), "windows": windows, "threads": threads}
            job.write_text(json.dumps(content))
            yield from run_process([self.python, llama_cpp_process.__file__, str(job)], log)


def run_process(command: list[str], log: IO[str]) -> Generator[PeerEvent, None, None]:
    """Yield the events that a process prints. `log` receives its messages. Raises `MeasurementFailed`."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        ended = False
        try:
            for line in process.stdout:
                yield parse_event(json.loads(line))
            ended = True
        finally:
            if not ended:  # Ctrl-C, or the caller wants no more
                process.kill()
    if process.returncode != 0:
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()][-_LAST_LINES:]
        raise MeasurementFailed(f"llama.cpp ended with status {process.returncode}: " + "; ".join(lines))


def parse_event(event: Mapping[str, Any]) -> PeerEvent:
    return PeerEvent(**{**event, "likeliest": tuple(event.get("likeliest", ()))})
