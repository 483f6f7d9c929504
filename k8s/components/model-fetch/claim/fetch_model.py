"""Copies a checkpoint to ARMATURE_MODEL before the server starts. Uses only the standard library.

It copies to another name and renames the copy when it is complete and on disk, so no server sees half of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.request import urlopen

PIECE_BYTES = 1 << 20
TIMEOUT_SECONDS = 60  # without data, not for the whole download
SUMS = "SHA256SUMS"  # if the source has this file, every file in it must have the listed checksum


class Unfinished(Exception):
    """The copy failed. The message is a sentence that says why."""


class Counted:
    """A download that counts its bytes, since an interrupted one looks like a complete one."""

    def __init__(self, response: IO[bytes]) -> None:
        self._response = response
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._response.read(size)
        self.size += len(piece)
        return piece


def fetch(source: str, target: Path, owner: str) -> str:
    """Copy the checkpoint and return what was done, as text.

    `owner` is part of the temporary name, so that pods with the same claim do not collide.
    """
    if target.exists():
        return f"{target} is there already"
    began = time.monotonic()
    staged = target.parent / f".{target.name}.{owner}.incomplete"
    shutil.rmtree(staged, ignore_errors=True)  # from this pod's previous attempt
    try:
        staged.mkdir(parents=True)
        (download if source.startswith(("https://", "http://")) else copy)(source, staged)
        found = model_folder(staged)
        check_sums(found)
        sync(found)
        first = publish(found, target)
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return (
        f"{target}: {size / 2**30:.2f} GiB in {time.monotonic() - began:.1f} s"
        if first
        else f"{target}: another pod was first"
    )


def copy(source: str, into: Path) -> None:
    """Copy a folder. Links are followed, because the caches of model hubs use them."""
    if not Path(source).is_dir():
        raise Unfinished(f"MODEL_SOURCE {source} is no folder here: is the model in this image, or its volume mounted?")
    shutil.copytree(source, into, copy_function=shutil.copyfile, dirs_exist_ok=True)


def download(url: str, into: Path) -> None:
    """Download a tar file, compressed or not, and unpack it while it is read."""
    with urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        counted = Counted(response)
        with tarfile.open(fileobj=counted, mode="r|*") as archive:  # type: ignore[call-overload]  # only `read` is needed
            for member in archive:
                unpack(archive, member, into)
        while counted.read(PIECE_BYTES):  # the padding at the end
            pass
        promised = response.headers.get("Content-Length")
    if promised is not None and counted.size != int(promised):
        raise Unfinished(f"{counted.size} of {promised} bytes came")


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Unpack one member: only plain files, and only below the folder, since an archive is not trusted."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
        raise Unfinished(f"the archive holds {member.name!r}, which is no plain file below its folder")
    content = archive.extractfile(member)
    if content is None:  # a folder, which is created with its files
        return
    file = into / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        shutil.copyfileobj(content, out, PIECE_BYTES)


def model_folder(staged: Path) -> Path:
    """Return the folder itself, or the only folder in it, as in archives."""
    entries = list(staged.iterdir())
    if not entries:
        raise Unfinished("the source is empty")
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else staged


def check_sums(folder: Path) -> None:
    sums = folder / SUMS
    for line in sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []:
        wanted, _, name = line.partition(" ")
        file = folder / name.lstrip(" *")
        if not file.is_file() or digest(file) != wanted.lower():
            raise Unfinished(f"{name.lstrip(' *')} is not what {SUMS} says")


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Write everything to disk: otherwise the new name may be on disk before the content."""
    for entry in (*folder.rglob("*"), folder):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(found: Path, target: Path) -> bool:
    """Rename the copy. Returns False if another pod was faster, which is no error."""
    try:
        found.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def main(environ: Mapping[str, str]) -> int:
    source, target = environ.get("MODEL_SOURCE"), environ.get("ARMATURE_MODEL")
    if not source or not target:
        sys.stderr.write(
            "model-fetch: MODEL_SOURCE says where the model comes from, ARMATURE_MODEL where it goes: one is missing.\n"
        )
        return 2
    try:
        sys.stdout.write(f"model-fetch: {fetch(source, Path(target), environ.get('HOSTNAME', 'here'))}\n")
    except (Unfinished, OSError, tarfile.TarError, EOFError) as error:
        sys.stderr.write(f"model-fetch: {source} could not be copied to {target}: {' '.join(str(error).split())}.\n")
        return 1
    return 0


if __name__ == "__main__":
    # The first process of a container ignores signals without a handler. This handler also removes the incomplete copy.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(os.environ))
