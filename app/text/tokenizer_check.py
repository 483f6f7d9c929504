"""Tries a checkpoint's tokenizer in a process with limits, before the server loads it.

A tokenizer that passed is noted by its content, so that later starts do not try it again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import tokenizers

from app.errors import CheckpointInvalid, NotReady
from app.text.template_process import KEPT_VARIABLES, import_paths
from app.text.tokenizer import Tokenizer
from app.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, open_trusted

log = logging.getLogger(__name__)

NOTES = "tokenizers"  # folder of the notes
# The tokenizer of Gemma 3 (33 MB, 262,000 tokens) takes 4.6 s of CPU time and 0.65 GB on AMD Zen 3. The limits are
# 83 s and 1.3 GB for it.
_MEMORY_BYTES, _MEMORY_FACTOR = 512 * 2**20, 24
_CPU_SECONDS, _CPU_SECONDS_PER_MIB = 20, 2
_WALL_FACTOR = 25  # of the CPU time: only a busy machine makes the wait longer
_MAIN = "import sys; sys.path += sys.argv[1:]; from app.text.tokenizer_probe import main; main()"
_MAX_REASON = 300


def try_and_load(location: Path, folder: Path | None, lowercases: bool = False) -> Tokenizer:
    """Return the tokenizer of a checkpoint, after it was tried as `check_tokenizer` says."""
    files = read_tokenizer_files(location)
    check_tokenizer(files, folder)
    return Tokenizer(location, lowercases, files)


def check_tokenizer(files: TokenizerFiles, folder: Path | None) -> None:
    """Check that a tokenizer can be loaded and used within limits of time and memory.

    Args:
        files: The tokenizer's files.
        folder: The cache folder, in which tokenizers that passed are noted; None: nothing is noted.

    Raises:
        CheckpointInvalid: It cannot be used.
        NotReady: The operating system could not start the process.
    """
    content = files.tokenizer.encode("utf-8", "surrogatepass")
    key = f"{VERSION} {tokenizers.__version__} {hashlib.sha256(content).hexdigest()}"
    note = None if folder is None else folder / NOTES / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.checked"
    if note is not None and _is_noted(note):
        return
    reason = fault_of_tokenizer(content)
    if reason:
        raise CheckpointInvalid(
            f"{files.origin} is not a tokenizer that can be used: {reason[:_MAX_REASON]}. Save it again with the library "
            f"tokenizers {tokenizers.__version__}, or fetch the checkpoint again."
        )
    if note is not None:
        with suppress(OSError), atomic_write(note, durable=False):
            pass  # where the cache cannot be written, the next start tries again


def _is_noted(note: Path) -> bool:
    try:
        os.close(open_trusted(note))
    except (OSError, FileUnusable):
        return False
    return True


def fault_of_tokenizer(content: bytes) -> str:
    """Return why a tokenizer.json cannot be used; empty if it can."""
    memory_bytes = _MEMORY_BYTES + _MEMORY_FACTOR * len(content)
    cpu_seconds = _CPU_SECONDS + _CPU_SECONDS_PER_MIB * len(content) // 2**20
    command = [sys.executable or "python3", "-I", "-S", "-B", "-c", _MAIN, *import_paths(("app", "tokenizers"))]
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            command,
            input=f"{memory_bytes} {cpu_seconds}\n".encode() + content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_WALL_FACTOR * cpu_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"trying it took more than {_WALL_FACTOR * cpu_seconds} s"
    except OSError as error:
        raise NotReady(f"The process that tries the tokenizer cannot be started: {error}.") from error
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace")
    if done.returncode == -signal.SIGPROF:
        return f"a few short texts take more than {cpu_seconds} s of CPU time"
    if done.returncode in (-signal.SIGABRT, -signal.SIGKILL):
        return f"a few short texts take more than {memory_bytes >> 20} MiB of memory"
    return f"the process that tried it ended with status {done.returncode}"
