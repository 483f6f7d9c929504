"""Which checkpoint a directory holds, by its bytes: two of the same name, size and age are told apart, and a copy is recognised.

Hashing takes seconds for gigabytes, so the result is noted beside the packs, and holds as long as no file's size, time or inode changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from app.weights.checkpoint import Checkpoint
from app.weights.whole_file import FileUnusable, check_ours

_PART_BYTES = 64 * 2**20  # hashed by one thread
_READ_BYTES = 4 * 2**20
_SETTLED_NANOSECONDS = 2 * 10**9  # a file this young may change again within the same tick of its file system's clock


def content_of(checkpoint: Checkpoint, notes: Path, threads: int) -> str:
    """A hash of config.json and of every file of weights. Raises `OSError` where they cannot be read."""
    files = sorted({entry.file for entry in checkpoint.tensors.values()} | {checkpoint.directory / "config.json"})
    known = [_identity(file) for file in files]
    note = notes / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.content"
    noted = _read_note(note)
    if noted is not None:
        return noted
    content = _hash(files, threads)
    settled = max(changed for _, _, changed, _ in known) < time.time_ns() - _SETTLED_NANOSECONDS
    if settled and known == [_identity(file) for file in files]:
        _write_note(note, content)
    return content


def _identity(file: Path) -> tuple[str, int, int, int]:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino


def _hash(files: Sequence[Path], threads: int) -> str:
    """Of the hashes of all parts, in order: the parts are hashed by several threads."""
    parts = [(file, start) for file in files for start in range(0, max(1, file.stat().st_size), _PART_BYTES)]
    whole = hashlib.sha256()
    with ThreadPoolExecutor(threads) as pool:
        for (file, start), digest in zip(parts, pool.map(_hash_part, parts), strict=True):
            whole.update(f"{file.name} {start} ".encode() + digest)
    return whole.hexdigest()


def _hash_part(part: tuple[Path, int]) -> bytes:
    file, start = part
    digest, left = hashlib.sha256(), _PART_BYTES
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (some := stream.read(min(left, _READ_BYTES))):
            digest.update(some)
            left -= len(some)
    return digest.digest()


def _read_note(note: Path) -> str | None:
    try:
        with note.open() as stream:
            check_ours(os.fstat(stream.fileno()))
            content = stream.read(65)
    except (OSError, ValueError, FileUnusable):
        return None
    return content if len(content) == 64 and set(content) <= set("0123456789abcdef") else None


def _write_note(note: Path, content: str) -> None:
    """Nothing is lost where it cannot be: the next start hashes again."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(content)
        partial.chmod(0o644)
        partial.replace(note)
