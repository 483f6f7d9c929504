"""Messages about checkpoint files: a missing volume, missing permissions or an incomplete copy, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import CheckpointInvalid

WHOLE = "A checkpoint is a directory with config.json, *.safetensors and tokenizer.json."
# Names of files that are still being copied, used by Hugging Face's hub, browsers, aria2, Google Cloud Storage and
# others.
_UNDER_WAY = (
    "*.incomplete",
    "*.part",
    "*.partial",
    "*.crdownload",
    "*.aria2",
    "*.tmp",
    "*.gstmp",
    ".cache/huggingface/download/*.incomplete",
)
_POINTER = b"version https://git-lfs.github.com/spec/"  # start of a Git LFS pointer, a file not fetched
_OF_THE_FILE_SYSTEM = "lost+found"  # a folder in newly created volumes
_SHOWN = 4  # names in one message


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the block into `CheckpointInvalid` with a clear message."""
    try:
        yield
    except OSError as error:
        raise CheckpointInvalid(unreadable(Path(error.filename or path), error)) from error


def check_directory(directory: Path) -> None:
    """Check that a checkpoint directory exists and is not empty.

    Raises:
        CheckpointInvalid: There is nothing to read.
        OSError: The directory may not be read.
    """
    if not directory.exists():
        raise CheckpointInvalid(f"Checkpoint {directory} does not exist{_around(directory)} {WHOLE}")
    if not directory.is_dir():
        raise CheckpointInvalid(f"Checkpoint {directory} is a file; give the directory that contains it. {WHOLE}")
    if not _entries(directory):
        raise CheckpointInvalid(f"Checkpoint {directory} is empty: is a volume mounted there, and the model in it? {WHOLE}")


def check_fetched(file: Path) -> None:
    """Check that a file is not a Git LFS pointer.

    Raises:
        CheckpointInvalid: It is one.
        OSError: The file cannot be read.
    """
    if is_pointer(file):
        raise CheckpointInvalid(f"{file.name} cannot be used. {remedy(file)}")


def is_pointer(file: Path) -> bool:
    """Return True if a file is a Git LFS pointer."""
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def remedy(file: Path) -> str:
    """Return a sentence that says what to do about a damaged file."""
    with suppress(OSError):
        if is_pointer(file):
            return f"{file} is a Git LFS pointer, not the file itself: fetch the file with git lfs pull."
    return f"Copy or download it to {file.parent} again.{under_way(file.parent)}"


def under_way(directory: Path) -> str:
    """Return a sentence that names the incomplete files of a copy, with a leading space; empty if there are none."""
    found = sorted({str(file.relative_to(directory)) for pattern in _UNDER_WAY for file in directory.glob(pattern)})
    return f" {_names(found)} there: a copy is running or was interrupted." if found else ""


def _around(path: Path) -> str:
    """Return the end of the message on a missing path: which files are there instead.

    The volume that should contain it may not be mounted, or another one may be.
    """
    parent = next(each for each in path.absolute().parents if each.is_dir())
    if parent != path.absolute().parent:
        return f", nor does {path.absolute().parent}: is a volume with models mounted there?"
    entries = _entries(parent)
    return (
        f" ({parent} has {_names(entries)})." if entries else f", and {parent} is empty: is a volume with models mounted there?"
    )


def _entries(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.name != _OF_THE_FILE_SYSTEM)


def _names(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def unreadable(path: Path, error: OSError) -> str:
    """Return a sentence on why a file cannot be read, with who may read it or what is missing."""
    if isinstance(error, PermissionError):
        return f"{path} cannot be read by user {os.geteuid()}: {_closed(path)}. In a pod, fsGroup gives a volume's files to its group."
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there. Copy files, not links to them (cp -rL)."
    return f"{path} cannot be read: {error.strerror or error}. Is its volume in order?"


def _closed(path: Path) -> str:
    """Describe the owner and mode of the first parent directory without access, or of the file itself."""
    effective = os.access in os.supports_effective_ids
    above = [each for each in reversed(path.absolute().parents) if not os.access(each, os.X_OK, effective_ids=effective)]
    first = next(iter(above), path)
    status = first.stat()
    return f"{first} belongs to user {status.st_uid} and group {status.st_gid} and has mode {status.st_mode & 0o7777:04o}"
