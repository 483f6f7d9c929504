"""The fingerprint of a checkpoint: a hash of its files' bytes.

It distinguishes checkpoints of the same name, size and age, and recognizes copies. Hashing takes seconds for
gigabytes, so the result is stored next to the packs; it is valid until the size, time or inode of a file changes.
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

_PART_BYTES = 64 * 2**20  # bytes hashed by one thread at a time
_READ_BYTES = 4 * 2**20
_SETTLED_NANOSECONDS = 2 * 10**9  # a younger file may change again within the same tick of the file system's clock


def content_of(checkpoint: Checkpoint, notes: Path, threads: int) -> str:
    """Return a SHA-256 hash of config.json and of every weight file, as hexadecimal text.

    Args:
        checkpoint: The checkpoint.
        notes: The folder in which earlier results are stored.
        threads: The number of threads that hash.

    Raises:
        OSError: A file cannot be read.
    """
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
    """Return the hash of the hashes of all parts in order; several threads hash the parts."""
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
    """Store the hash; if that fails, the next start hashes again."""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(content)
        partial.chmod(0o644)
        partial.replace(note)
