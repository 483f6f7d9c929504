"""Files that are kept for the next start: whole or not there, and believed only where nobody but us or root could have written them.

What they hold decides what people are answered. Several processes may write and read the same one at once.
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
_warned: set[Path] = set()  # folders of which it was told that nothing can be kept there


class FileUnusable(Exception):
    """This file cannot be used, and why: whoever asked makes it again."""


@contextmanager
def replacing(target: Path) -> Iterator[FileIO]:
    """A new file beside the target, which takes its place at the end, at once. On any error, or Ctrl-C, nothing is left behind.

    Raises `OSError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _sweep(target.parent)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    partial = Path(name)
    with ExitStack() as undo:
        undo.callback(partial.unlink, missing_ok=True)
        with FileIO(descriptor, "wb") as stream:
            yield stream
            os.fchmod(stream.fileno(), 0o644)  # others may read it; who else may write is the directory's business
            os.fsync(stream.fileno())
        partial.replace(target)
        undo.pop_all()
    _sync_folder(target.parent)


def open_ours(file: Path) -> int:
    """Its descriptor. Raises `FileNotFoundError` where there is none, and `FileUnusable` where others could have written it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait
    except FileNotFoundError:
        raise
    except OSError as error:
        with suppress(PermissionError):  # where the folder is closed there is nothing, for us: who wants to write there is told
            file.lstat()
            raise FileUnusable(f"it cannot be opened ({error.strerror})") from error
        raise FileNotFoundError(error.errno, error.strerror, str(file)) from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        check_ours(os.fstat(descriptor))
        undo.pop_all()
    return descriptor


def check_ours(status: os.stat_result) -> None:
    """Raises `FileUnusable` where somebody else could have written it. Root's is as good as our own."""
    if not stat.S_ISREG(status.st_mode):
        raise FileUnusable("it is no ordinary file")
    if status.st_uid not in (os.getuid(), 0):
        raise FileUnusable(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileUnusable("others may write to it")


def tell_unkept(file: Path, what: str, error: OSError) -> None:
    """One warning a process, whatever else cannot be kept either: a cache volume that is full or read-only stops nobody."""
    cache = file.parent.parent
    level = logging.INFO if cache in _warned else logging.WARNING
    _warned.add(cache)
    log.log(
        level, "%s cannot be kept in %s (%s): serving goes on, and the next start makes it again", what, cache, error.strerror
    )


def differences(ours: Mapping[str, str], others: Iterable[Mapping[str, str]]) -> str:
    """In what files that are not for this start differ from what is looked for, by the names in their keys; empty where there are none."""
    return ", ".join(sorted({name for key in others for name, value in ours.items() if key.get(name) != value}))


def _sweep(folder: Path) -> None:
    """What a process that was killed left half written goes after a while."""
    for file in folder.glob(f"{PARTIAL}*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot, and the name is only worth making the file again
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
