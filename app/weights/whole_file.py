"""Cache files that are kept for the next start: written atomically, and read only if they can be trusted.

Their contents decide the model's answers. So a file is used only if no user except this process's and root could
have written it. Several processes may write and read the same file at once.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

log = logging.getLogger(__name__)

PARTIAL, _ABANDONED_SECONDS = ".partial-", 3600.0
_warned: set[Path] = set()  # folders for which a warning was logged


class FileUnusable(Exception):
    """Raised with the reason if a cache file cannot be used; the caller makes it again."""


@contextmanager
def replacing(target: Path) -> Iterator[FileIO]:
    """Yield a new file that atomically replaces the target at the end.

    On any error, or Ctrl-C, no file is left behind.

    Raises:
        OSError: The file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _sweep(target.parent)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    partial = Path(name)
    with ExitStack() as undo:
        undo.callback(partial.unlink, missing_ok=True)
        with FileIO(descriptor, "wb") as stream:
            yield stream
            os.fchmod(stream.fileno(), 0o644)  # others may read it; the directory's mode decides who may replace it
            os.fsync(stream.fileno())
        partial.replace(target)
        undo.pop_all()
    _sync_folder(target.parent)


def open_ours(file: Path) -> int:
    """Open a trusted file and return its descriptor.

    Raises:
        FileNotFoundError: There is no such file.
        FileUnusable: Other users could have written it.
    """
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
        check_ours(os.fstat(descriptor))
        undo.pop_all()
    return descriptor


def check_ours(status: os.stat_result) -> None:
    """Check that only this process's user or root could have written a file.

    Raises:
        FileUnusable: Another user could have.
    """
    if not stat.S_ISREG(status.st_mode):
        raise FileUnusable("it is not a regular file")
    if status.st_uid not in (os.getuid(), 0):
        raise FileUnusable(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileUnusable("others may write to it")


def tell_unkept(file: Path, what: str, error: OSError) -> None:
    """Log that a file cannot be kept: one warning per cache folder, then only information.

    A full or read-only cache volume does not stop serving.
    """
    cache = file.parent.parent
    level = logging.INFO if cache in _warned else logging.WARNING
    _warned.add(cache)
    log.log(
        level, "%s cannot be kept in %s (%s): serving goes on, and the next start makes it again", what, cache, error.strerror
    )


def differences(ours: Mapping[str, str], others: Iterable[Mapping[str, str]]) -> str:
    """Return the names of the key fields in which other files differ from `ours`, joined; empty if there are none."""
    return ", ".join(sorted({name for key in others for name, value in ours.items() if key.get(name) != value}))


def _sweep(folder: Path) -> None:
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
