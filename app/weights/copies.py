"""What is wrong with a checkpoint as files: no volume, no permission, a copy that is not whole; and what would mend it, in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import CheckpointInvalid

WHOLE = "A checkpoint is a directory with config.json, *.safetensors and tokenizer.json."
# How a copy that is under way is named, by Hugging Face's hub, browsers, aria2, Google's storage and many others.
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
_POINTER = (
    b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer begins, which stands for a file that was not fetched
)
_OF_THE_FILE_SYSTEM = "lost+found"  # what a volume has that was made a moment ago
_SHOWN = 4  # names in one sentence


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the operating system refuses meanwhile becomes a sentence. Raises `CheckpointInvalid`."""
    try:
        yield
    except OSError as error:
        raise CheckpointInvalid(unreadable(Path(error.filename or path), error)) from error


def check_directory(directory: Path) -> None:
    """Raises `CheckpointInvalid` where nothing is there to be read, and `OSError` where it may not be read."""
    if not directory.exists():
        raise CheckpointInvalid(f"Checkpoint {directory} does not exist{_around(directory)} {WHOLE}")
    if not directory.is_dir():
        raise CheckpointInvalid(f"Checkpoint {directory} is a file; give the directory it lies in. {WHOLE}")
    if not _entries(directory):
        raise CheckpointInvalid(f"Checkpoint {directory} is empty: is a volume mounted there, and the model in it? {WHOLE}")


def check_fetched(file: Path) -> None:
    """Raises `CheckpointInvalid` where a Git LFS pointer stands for it, and `OSError` where it may not be read."""
    if is_pointer(file):
        raise CheckpointInvalid(f"{file.name} cannot be used. {remedy(file)}")


def is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


def remedy(file: Path) -> str:
    """What to do about a file that is not as it should be."""
    with suppress(OSError):
        if is_pointer(file):
            return f"{file} is a pointer of Git LFS and not the file itself: fetch that with git lfs pull."
    return f"Copy or download it to {file.parent} again.{under_way(file.parent)}"


def under_way(directory: Path) -> str:
    """A sentence that names what a copy has left half done, to stand behind another; empty where there is nothing."""
    found = sorted({str(file.relative_to(directory)) for pattern in _UNDER_WAY for file in directory.glob(pattern)})
    return f" {_names(found)} there: a copy is under way, or was broken off." if found else ""


def _around(path: Path) -> str:
    """The end of that sentence: what is in its place. The volume that should have held it may not be mounted, or hold something else."""
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
    """What the operating system says of it, with who may read it or what is missing."""
    if isinstance(error, PermissionError):
        return f"{path} cannot be read by user {os.geteuid()}: {_closed(path)}. In a pod, fsGroup gives a volume's files to its group."
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there. Copy files, not links to them (cp -rL)."
    return f"{path} cannot be read: {error.strerror or error}. Is its volume in order?"


def _closed(path: Path) -> str:
    """The first of the directories down to it that is closed, or the file itself."""
    effective = os.access in os.supports_effective_ids
    above = [each for each in reversed(path.absolute().parents) if not os.access(each, os.X_OK, effective_ids=effective)]
    first = next(iter(above), path)
    status = first.stat()
    return f"{first} belongs to user {status.st_uid} and group {status.st_gid} and has mode {status.st_mode & 0o7777:04o}"
