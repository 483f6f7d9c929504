"""The pack file format: a JSON header, then blobs of bytes at multiples of 64, each with a checksum.

It is like safetensors, but aligned for the kernels and verified before use. A file exists completely or not at all.
It is loaded only if no user except this process's and root could have written it, since its contents decide the
model's answers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.kernels.memory import weights_bytes
from app.weights.headers import MAX_HEADER_BYTES
from app.weights.whole_file import FileUnusable, open_ours, replacing

MAGIC = b"armature pack 1\n"
ALIGNMENT = 64
_BEGIN = len(MAGIC) + 16  # magic, then the header's length and checksum, little-endian
_CHUNK_BYTES = 4 * 2**20  # bytes read and verified at a time, so that they stay in the processor's cache
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes `[start, start + nbytes)` of the file, with their CRC-32."""

    start: int
    nbytes: int
    checksum: int


# ---- writing ----------------------------------------------------------------------------------------------------------


def write_pack(target: Path, key: Mapping[str, str], blobs: Mapping[str, Tensor], progress: Progress) -> int:
    """Write a pack atomically and return its bytes. On any error, or Ctrl-C, no file is left behind.

    Args:
        target: The path of the pack.
        key: What the pack was made for.
        blobs: Contiguous tensors by name.
        progress: Called with (bytes done, bytes in total).

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(target) as stream:
        return _write(stream.fileno(), key, blobs, progress)


def _write(file: int, key: Mapping[str, str], blobs: Mapping[str, Tensor], progress: Progress) -> int:
    places = {name: Blob(0, blob.nbytes, 0) for name, blob in blobs.items()}
    at = _aligned(
        _BEGIN + len(_header(key, places))
    )  # numbers have a fixed width, so the header's length is known before their values
    done, total = 0, sum(blob.nbytes for blob in blobs.values())
    for name, blob in blobs.items():
        checksum = 0
        whole = _view(blob)
        for first in range(0, len(whole), _CHUNK_BYTES):
            chunk = whole[first : first + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            _put(file, chunk, at + first)
            done += len(chunk)
            progress(done, total)
        places[name] = Blob(at, blob.nbytes, checksum)
        at = _aligned(at + blob.nbytes)
    os.ftruncate(file, at)
    header = _header(key, places)
    _put(file, MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(8, "little") + header, 0)
    return at


def _header(key: Mapping[str, str], blobs: Mapping[str, Blob]) -> bytes:
    listed = {name: f"{blob.start:016x} {blob.nbytes:016x} {blob.checksum:08x}" for name, blob in blobs.items()}
    return json.dumps({"key": dict(key), "blobs": listed}).encode()


def _put(file: int, some: bytes | memoryview, at: int) -> None:
    view = memoryview(some)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _view(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes; valid as long as the caller holds the tensor."""
    assert tensor.is_contiguous(), "a blob must be contiguous"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


# ---- reading ----------------------------------------------------------------------------------------------------------


class Pack:
    """An open pack with a verified header; each blob is verified when it is read."""

    def __init__(self, file: int, blobs: Mapping[str, Blob]) -> None:
        self._file, self.blobs, self.size = file, blobs, os.fstat(file).st_size

    def read(self, name: str) -> Tensor:
        """Return a blob as uint8 in private memory, on huge pages if it is large.

        Raises:
            FileUnusable: The bytes do not match their checksum.
        """
        blob = self.blobs[name]
        target, checksum = weights_bytes(blob.nbytes), 0
        view = _view(target)
        for first in range(0, blob.nbytes, _CHUNK_BYTES):
            chunk = view[first : first + _CHUNK_BYTES]
            self._fill(chunk, blob.start + first)
            checksum = zlib.crc32(chunk, checksum)
        _check(name, checksum, blob)
        return target

    def mapping(self) -> Callable[[str], Tensor]:
        """Return a function like `read` whose tensors are views of the mapped file, which processes share."""
        region = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(
                OSError
            ):  # Linux with large folios in the file system: reading and mapping 656 MB took 0.6 s instead of 2.4
                region.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # read-only on purpose
            whole = torch.frombuffer(region, dtype=torch.uint8)

        def mapped(name: str) -> Tensor:
            blob = self.blobs[name]
            part = whole[blob.start : blob.start + blob.nbytes]
            _check(name, zlib.crc32(_view(part)), blob)
            return part

        return mapped

    def close(self) -> None:
        """Close the file; mapped tensors stay valid."""
        os.close(self._file)

    def _fill(self, chunk: memoryview, at: int) -> None:
        while chunk:
            count = os.preadv(self._file, [chunk], at)
            if count == 0:
                raise FileUnusable("it became shorter while it was read")
            chunk, at = chunk[count:], at + count


def open_pack(file: Path, key: Mapping[str, str]) -> Pack:
    """Open a pack and verify its header.

    Raises:
        FileNotFoundError: There is no such file.
        FileUnusable: The file is incomplete, was made for another key, or could have been written by another user.
    """
    descriptor = open_ours(file)
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        header = _read_header(descriptor)
        if header["key"] != dict(key):
            raise FileUnusable("it was made for another checkpoint, recipe or version")
        pack = Pack(descriptor, _blobs(descriptor, header))
        undo.pop_all()
        return pack


def key_in(file: Path) -> Mapping[str, str]:
    """Return the key of a pack.

    Raises:
        FileUnusable: The file cannot be used.
        OSError: The file cannot be read.
    """
    descriptor = open_ours(file)
    try:
        key: Mapping[str, str] = _read_header(descriptor)["key"]
        return key
    finally:
        os.close(descriptor)


def _read_header(file: int) -> Mapping[str, Any]:
    size = os.fstat(file).st_size
    begin = os.pread(file, _BEGIN, 0)
    length, checksum = (int.from_bytes(begin[at : at + 8], "little") for at in (len(MAGIC), len(MAGIC) + 8))
    if begin[: len(MAGIC)] != MAGIC or length > min(size - _BEGIN, MAX_HEADER_BYTES):
        raise FileUnusable("it is not a whole pack of this version")
    text = os.pread(file, length, _BEGIN)
    if zlib.crc32(text) != checksum:
        raise FileUnusable("its header is damaged")
    header: Mapping[str, Any] = json.loads(text)  # the checksum has proved that it is as written
    return header


def _blobs(file: int, header: Mapping[str, Any]) -> Mapping[str, Blob]:
    size = os.fstat(file).st_size
    blobs = {name: _blob(place) for name, place in header["blobs"].items()}
    if any(blob.start % ALIGNMENT or blob.start + blob.nbytes > size for blob in blobs.values()):
        raise FileUnusable("it has been cut short")
    return blobs


def _blob(place: str) -> Blob:
    start, nbytes, checksum = (int(word, 16) for word in place.split())
    return Blob(start, nbytes, checksum)


def _check(name: str, checksum: int, blob: Blob) -> None:
    if checksum != blob.checksum:
        raise FileUnusable(f"the bytes of {name} are damaged")
