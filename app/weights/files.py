"""Reading JSON files of a checkpoint, and messages about a missing volume, missing permissions or an incomplete copy.

A checkpoint is untrusted: `file_in` follows its links only within it and the hub cache that it is part of.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid

LAYOUT_HINT = "A checkpoint is a directory with config.json, *.safetensors and tokenizer.json, or a GGUF file."
# Names of files that are still being copied, used by Hugging Face's hub, browsers, aria2, Google Cloud Storage and
# others.
_INCOMPLETE_PATTERNS = (
    "*.incomplete",
    "*.part",
    "*.partial",
    "*.crdownload",
    "*.aria2",
    "*.tmp",
    "*.gstmp",
    ".cache/huggingface/download/*.incomplete",
)
_LFS_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"  # start of a Git LFS pointer, a file not fetched
_FILE_SYSTEM_FOLDER = "lost+found"  # a folder in newly created volumes
_MAX_NAMES = 4  # names in one message
_MAX_NAME_BYTES = 255  # of a file's name, in all file systems in use
_SHOWN_NAME = 80  # characters of a name in a message
MAX_JSON_BYTES = 64 * 2**20  # of a file with JSON: an index of a million tensors is shorter
# A hub cache has models--NAME/snapshots/REVISION/FILE, a link to models--NAME/blobs/HASH.
_SNAPSHOTS, _BLOBS, _MODELS = "snapshots", "blobs", "models--"


class NotRegularFile(OSError):
    """A pipe, device, socket or folder is where a file should be."""


def open_regular(file: Path) -> FileIO:
    """Open a file without a buffer. Raises `NotRegularFile` for a pipe or device, or `OSError`."""
    stream = FileIO(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise NotRegularFile(errno.EINVAL, "it is not a regular file", str(file))


@contextmanager
def readable_or_invalid(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the block into `CheckpointInvalid` with a clear message."""
    try:
        yield
    except OSError as error:
        raise CheckpointInvalid(unreadable_message(Path(error.filename or path), error)) from error


def check_directory(directory: Path) -> None:
    """Raise `CheckpointInvalid` if a checkpoint directory is missing or empty, `OSError` if it may not be read."""
    if not directory.exists():
        raise CheckpointInvalid(f"Checkpoint {directory} does not exist{_existing_files_note(directory)} {LAYOUT_HINT}")
    if not directory.is_dir():
        raise CheckpointInvalid(f"Checkpoint {directory} is a file; give the directory that contains it. {LAYOUT_HINT}")
    if not _entries(directory):
        raise CheckpointInvalid(
            f"Checkpoint {directory} is empty: is a volume mounted there, and the model in it? {LAYOUT_HINT}"
        )


def file_in(directory: Path, name: str) -> Path:
    """Return the path of a checkpoint's file, which may be missing.

    Links are followed if they end within the checkpoint (as Kubernetes mounts volumes), or in the blobs of the hub
    cache that the checkpoint is a snapshot of; else they could be any file of the machine. Raises `CheckpointInvalid`
    if no file can have the name, a link leads elsewhere, or it is not a regular file; `OSError` if a folder cannot be
    read.
    """
    path, real = _resolve_in(directory, name)
    if real is not None and not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointInvalid(f"{path} is not a regular file.")
    return path


def folder_in(directory: Path, name: str) -> Path:
    return _resolve_in(directory, name)[0]


def _resolve_in(directory: Path, name: str) -> tuple[Path, Path | None]:
    if "\0" in name or any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in name.split("/")):
        raise CheckpointInvalid(f"{directory} refers to a file that cannot exist: {name[:_SHOWN_NAME]!r}.")
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except (FileNotFoundError, UnicodeEncodeError):
        return path, None
    except RuntimeError as error:  # Python before 3.13, for a link to itself
        raise CheckpointInvalid(f"{path} is a link that leads to itself.") from error
    if not any(real.is_relative_to(folder) for folder in _checkpoint_folders(directory.resolve())):
        raise CheckpointInvalid(
            f"{path} leads out of the checkpoint, to {str(real)[:_SHOWN_NAME]}. Copy files, not links to them (cp -rL)."
        )
    return path, real


def _checkpoint_folders(directory: Path) -> Iterator[Path]:
    yield directory
    for folder in (directory, *directory.parents):
        if folder.parent.name == _SNAPSHOTS and folder.parent.parent.name.startswith(_MODELS):
            yield folder.parent.parent / _BLOBS


def files_in(directory: Path, pattern: str) -> list[Path]:
    return sorted(file_in(directory, file.name) for file in directory.glob(pattern))


def check_not_lfs_pointer(file: Path) -> None:
    """Raise `CheckpointInvalid` if a file is a Git LFS pointer, `OSError` if it cannot be read."""
    if is_lfs_pointer(file):
        raise CheckpointInvalid(f"{file.name} cannot be used. {remedy(file)}")


def is_lfs_pointer(file: Path) -> bool:
    with open_regular(file) as stream:
        return stream.read(len(_LFS_POINTER_PREFIX)) == _LFS_POINTER_PREFIX


def remedy(file: Path) -> str:
    """Return a sentence that says what to do about a damaged file."""
    with suppress(OSError):
        if is_lfs_pointer(file):
            return f"{file} is a Git LFS pointer, not the file itself: fetch the file with git lfs pull."
    return f"Copy or download it to {file.parent} again.{incomplete_copy_note(file.parent)}"


def incomplete_copy_note(directory: Path) -> str:
    """Return a sentence that names the incomplete files of a copy, with a leading space; empty if there are none."""
    found = sorted(
        {str(file.relative_to(directory)) for pattern in _INCOMPLETE_PATTERNS for file in directory.glob(pattern)}
    )
    return f" {join_names(found)} there: a copy is running or was interrupted." if found else ""


def _existing_files_note(path: Path) -> str:
    parent = next(each for each in path.absolute().parents if each.is_dir())
    if parent != path.absolute().parent:
        return f", nor does {path.absolute().parent}: is a volume with models mounted there?"
    entries = _entries(parent)
    return (
        f" ({parent} has {join_names(entries)})."
        if entries
        else f", and {parent} is empty: is a volume with models mounted there?"
    )


def _entries(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.name != _FILE_SYSTEM_FOLDER)


def join_names(names: list[str]) -> str:
    """Return names for a message: the first few, each shortened, and how many more there are."""
    shown = ", ".join(name[:120] for name in names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown


def unreadable_message(path: Path, error: OSError) -> str:
    """Return a sentence on why a file cannot be read, with who may read it or what is missing."""
    if isinstance(error, PermissionError):
        return (
            f"{path} cannot be read by user {os.geteuid()}: {_denied_access_note(path)}. In "
            "a pod, fsGroup gives a volume's files to its group."
        )
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there. Copy files, not links to them (cp -rL)."
    if isinstance(error, NotRegularFile):
        return f"{path} cannot be read: {error.strerror}, but a pipe, a device, a socket or a folder."
    return f"{path} cannot be read: {error.strerror or error}. Is its volume in order?"


def _denied_access_note(path: Path) -> str:
    """Describe the owner and mode of the first parent directory without access, or of the file itself."""
    effective = os.access in os.supports_effective_ids
    above = [
        each for each in reversed(path.absolute().parents) if not os.access(each, os.X_OK, effective_ids=effective)
    ]
    first = next(iter(above), path)
    status = first.stat()
    return (
        f"{first} belongs to user {status.st_uid} and group {status.st_gid} and has mode {status.st_mode & 0o7777:04o}"
    )


def read_object(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointInvalid` if it does not exist or is none."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not a JSON object.")
    return values


def read_optional(file: Path) -> Mapping[str, Any]:
    return read_object(file) if file.exists() else {}


def read_text(file: Path, max_bytes: int) -> str:
    """Return the text of a file in UTF-8. Raises `CheckpointInvalid` if it is longer or not UTF-8, or `OSError`."""
    with BufferedReader(open_regular(file)) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointInvalid(f"{file} is longer than {max_bytes} bytes.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointInvalid(f"{file} cannot be read: {error}. {remedy(file)}") from error


def read_json(file: Path) -> Any:
    """Return the JSON value in a file. Raises `CheckpointInvalid` if it does not exist or is not JSON."""
    if not file.is_file():
        raise CheckpointInvalid(
            f"{file.parent} has no {file.name}; a checkpoint is the whole directory as "
            f"transformers saves it.{incomplete_copy_note(file.parent)}"
        )
    try:
        return json.loads(read_text(file, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not JSON: {error}. {remedy(file)}") from error
