"""Copies a checkpoint to where ARMATURE_MODEL says, before the server starts. Standard library only: the image has no more.

Nobody ever sees half of it: it is copied under another name, and renamed when all of it is there and on the disk.
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
TIMEOUT_SECONDS = 60  # of silence, not of the whole
SUMS = "SHA256SUMS"  # where the source has such a file, every file that it names must be what it says


class Unfinished(Exception):
    """A sentence on why there is no model."""


class Counted:
    """A download that knows how much of it has come: one that breaks off looks like one that ends."""

    def __init__(self, response: IO[bytes]) -> None:
        self._response = response
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._response.read(size)
        self.size += len(piece)
        return piece


def fetch(source: str, target: Path, owner: str) -> str:
    """What was done, in words. `owner` is in the name under which it is copied, so that pods with one claim do not meet."""
    if target.exists():
        return f"{target} is there already"
    began = time.monotonic()
    staged = target.parent / f".{target.name}.{owner}.incomplete"
    shutil.rmtree(staged, ignore_errors=True)  # of this pod's own attempt before
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
    """A folder; links are followed, as hubs' caches are full of them."""
    if not Path(source).is_dir():
        raise Unfinished(f"MODEL_SOURCE {source} is no folder here: is the model in this image, or its volume mounted?")
    shutil.copytree(source, into, copy_function=shutil.copyfile, dirs_exist_ok=True)


def download(url: str, into: Path) -> None:
    """A tar file, unpacked as it comes, compressed or not."""
    with urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        counted = Counted(response)
        with tarfile.open(fileobj=counted, mode="r|*") as archive:  # type: ignore[call-overload]  # it reads, and no more is wanted
            for member in archive:
                unpack(archive, member, into)
        while counted.read(PIECE_BYTES):  # what pads the end
            pass
        promised = response.headers.get("Content-Length")
    if promised is not None and counted.size != int(promised):
        raise Unfinished(f"{counted.size} of {promised} bytes came")


def unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Plain files alone, and only below the folder: an archive is somebody else's."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
        raise Unfinished(f"the archive holds {member.name!r}, which is no plain file below its folder")
    content = archive.extractfile(member)
    if content is None:  # a folder: files make theirs
        return
    file = into / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        shutil.copyfileobj(content, out, PIECE_BYTES)


def model_folder(staged: Path) -> Path:
    """The folder itself, or the only one in it, as archives have it."""
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
    """Else the name may reach the disk before what it names."""
    for entry in (*folder.rglob("*"), folder):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(found: Path, target: Path) -> bool:
    """One rename; False where another pod has been quicker, which is as good."""
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
    # A container's first process is deaf to signals that it has no ear for; this way it also tidies up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(os.environ))
