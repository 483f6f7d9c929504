"""Cache files that are kept for the next start: written atomically, and read only if they can be trusted.

Their contents decide the model's answers, so only this process's user and root may have written them.
`checkpoint_fingerprint` hashes the bytes of a checkpoint's files; the result is stored next to the packs and valid
until the size, time or inode of a file changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from app.weights.checkpoint import Checkpoint
from app.weights.files import open_regular

log = logging.getLogger(__name__)

PACKS = "packs"  # the folder of packed weights, which has the hashes of checkpoints too
PARTIAL, _ABANDONED_SECONDS = ".partial-", 3600.0
_warned: set[Path] = set()  # folders for which a warning was logged
_CHUNK_BYTES = 64 * 2**20  # bytes hashed by one thread at a time
_READ_BYTES = 4 * 2**20
_STABLE_NANOSECONDS = 2 * 10**9  # a younger file may change again within the same tick of the file system's clock


class FileUnusable(Exception):
    """Raised with the reason if a cache file cannot be used; the caller makes it again."""


@contextmanager
def atomic_write(target: Path, mode: int = 0o644, durable: bool = True) -> Iterator[FileIO]:
    """Yield a new file that atomically replaces the target at the end; on any error no file is left behind.

    Others may read it by default; the directory's mode decides who may replace it. `durable`: wait until the disk has
    the content. Raises `OSError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_abandoned(target.parent)
    descriptor, partial = _open_partial(target.parent)
    with ExitStack() as undo:
        undo.callback(partial.unlink, missing_ok=True)
        with FileIO(descriptor, "wb") as stream:
            yield stream
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
            if not partial.exists():
                _give_name(stream.fileno(), partial)
        partial.replace(target)
        undo.pop_all()
    if durable:
        _sync_folder(target.parent)


def _open_partial(folder: Path) -> tuple[int, Path]:
    """Return a new file and its name until it is complete, which it may get at the end only."""
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
        with suppress(OSError):  # not all file systems support it
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), folder / f"{PARTIAL}{secrets.token_hex(8)}"
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=PARTIAL)
    return descriptor, Path(name)


def _give_name(descriptor: int, name: Path) -> None:
    folder = os.open(name.parent, os.O_RDONLY)
    try:  # with a folder's descriptor Python calls linkat, which follows the link to the file
        os.link(f"/proc/self/fd/{descriptor}", name.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def open_trusted(file: Path) -> int:
    """Open a trusted file and return its descriptor. Raises `FileNotFoundError` or `FileUnusable`."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe could block
    except FileNotFoundError:
        raise
    except OSError as error:
        with suppress(PermissionError):  # if the folder is closed, the file counts as absent
            file.lstat()
            raise FileUnusable(f"it cannot be opened ({error.strerror})") from error
        raise FileNotFoundError(error.errno, error.strerror, str(file)) from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        check_trusted(os.fstat(descriptor))
        undo.pop_all()
    return descriptor


def check_trusted(status: os.stat_result) -> None:
    """Raise `FileUnusable` if not only this process's user or root could have written a file."""
    if not stat.S_ISREG(status.st_mode):
        raise FileUnusable("it is not a regular file")
    if status.st_uid not in (os.getuid(), 0):
        raise FileUnusable(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileUnusable("others may write to it")


def log_not_kept(file: Path, what: str, error: OSError) -> None:
    """Log that a file cannot be kept: one warning per cache folder, then only information."""
    cache = file.parent.parent
    level = logging.INFO if cache in _warned else logging.WARNING
    _warned.add(cache)
    log.log(
        level,
        "%s cannot be kept in %s (%s): serving goes on, and the next start makes it again",
        what,
        cache,
        error.strerror,
    )


def differences(own_key: Mapping[str, str], other_keys: Iterable[Mapping[str, str]]) -> str:
    """Return the names of the key fields in which other files differ from `own_key`, joined; empty if none."""
    return ", ".join(sorted({name for key in other_keys for name, value in own_key.items() if key.get(name) != value}))


def _remove_abandoned(folder: Path) -> None:
    """Remove files that killed processes left incomplete, once they are an hour old."""
    for file in folder.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems do not support it, and a lost file is only made again
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoint_fingerprint(checkpoint: Checkpoint, notes: Path, threads: int) -> str:
    """Return a SHA-256 of config.json and every weight file, kept in the folder `notes`. Raises `OSError`."""
    files = checkpoint.content_files
    identities = [file_identity(file) for file in files]
    note = notes / f"{hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:32]}.content"
    noted = _read_note(note)
    if noted is not None:
        return noted
    content = _hash(files, threads)
    is_stable = max(changed for _, _, changed, _ in identities) < time.time_ns() - _STABLE_NANOSECONDS
    if is_stable and identities == [file_identity(file) for file in files]:
        _write_note(note, content)
    return content


def file_identity(file: Path) -> tuple[str, int, int, int]:
    """Return a file's path, size, time of change in nanoseconds, and inode. Raises `OSError`."""
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino


def _hash(files: Sequence[Path], threads: int) -> str:
    parts = [(file, start) for file in files for start in range(0, max(1, file.stat().st_size), _CHUNK_BYTES)]
    whole = hashlib.sha256()
    with ThreadPoolExecutor(threads) as pool:
        for (file, start), digest in zip(parts, pool.map(_hash_part, parts), strict=True):
            whole.update(f"{file.name} {start} ".encode() + digest)
    return whole.hexdigest()


def _hash_part(part: tuple[Path, int]) -> bytes:
    file, start = part
    digest, left = hashlib.sha256(), _CHUNK_BYTES
    with open_regular(file) as stream:
        stream.seek(start)
        while left and (chunk := stream.read(min(left, _READ_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


def _read_note(note: Path) -> str | None:
    try:
        with os.fdopen(open_trusted(note), encoding="ascii") as stream:
            content = stream.read(65)
    except (OSError, ValueError, FileUnusable):
        return None
    return content if len(content) == 64 and set(content) <= set("0123456789abcdef") else None


def _write_note(note: Path, content: str) -> None:
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(content)
        partial.chmod(0o644)
        partial.replace(note)
