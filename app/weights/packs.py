"""Pack files: the packed weights of one checkpoint in one recipe, read if they are valid, else made and kept.

The format is a JSON header, then blobs of bytes at multiples of 64, each with a checksum: like safetensors, but aligned
for the kernels and verified before use. Several processes may share the folder. A pack that is damaged, or that another
user could have written, is never used; the weights are packed again.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.hardware.kernel_advice import advise
from app.version import VERSION
from app.weights.cache_file import (
    PACKS,
    FileUnusable,
    atomic_write,
    checkpoint_fingerprint,
    differences,
    log_not_kept,
    open_trusted,
)
from app.weights.checkpoint import Checkpoint
from app.weights.form_choice import FormChoice, LayerPacking
from app.weights.safetensors import MAX_HEADER_BYTES
from armature_kernels.linear import int_panels, layout, quantization
from armature_kernels.linear.linear import host_architecture
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_packed

MAGIC = b"armature pack 1\n"
ALIGNMENT = 64
_BEGIN = len(MAGIC) + 16  # magic, then the header's length and checksum, little-endian
_CHUNK_BYTES = 4 * 2**20  # bytes read and verified at a time, so that they stay in the processor's cache
Progress = Callable[[int, int], None]
log = logging.getLogger(__name__)
FORMAT = 3  # version of the blobs' layout: raise it when csrc/ops.h changes the layout of packed weights
_QUANTIZATION_MODULES = (quantization, int_panels, layout)  # their source decides a weight's codes
BlobBytes = Callable[[frozenset[str]], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PackNotes:
    """What was decided and measured while packing.

    `upgraded` are the sources of the layers that are held in more bits. `cost` is the relative increase of perplexity
    that was measured; None: not measured.
    """

    upgraded: frozenset[str] = frozenset()
    cost: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"upgraded": sorted(self.upgraded), "cost": self.cost}

    @classmethod
    def from_json(cls, header: Mapping[str, Any]) -> PackNotes:
        return cls(frozenset(header["upgraded"]), header["cost"])


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes `[start, start + nbytes)` of the file, with their CRC-32."""

    start: int
    nbytes: int
    checksum: int


# ---- writing --------------------------------------------------------------------------------------------------------


def write_pack(
    target: Path,
    key: Mapping[str, str],
    blobs: Mapping[str, Tensor],
    progress: Progress,
    notes: PackNotes | None = None,
) -> int:
    """Write contiguous blobs as a pack for `key` atomically, and return its bytes. Raises `OSError`."""
    with atomic_write(target) as stream:
        _check_room(stream.fileno(), sum(blob.nbytes for blob in blobs.values()))
        return _write(stream.fileno(), {"key": dict(key), **(notes or PackNotes()).to_json()}, blobs, progress)


def _check_room(file: int, nbytes: int) -> None:
    """Raise the error of a full disk before anything is written."""
    system = os.fstatvfs(file)
    if system.f_blocks and system.f_bavail * system.f_frsize < nbytes:  # some network file systems tell no numbers
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(file: int, about: Mapping[str, Any], blobs: Mapping[str, Tensor], progress: Progress) -> int:
    places = {name: Blob(0, blob.nbytes, 0) for name, blob in blobs.items()}
    # Numbers have a fixed width, so the header's length is known before their values.
    at = _aligned(_BEGIN + len(_header(about, places)))
    for name, blob in blobs.items():
        places[name] = Blob(at, blob.nbytes, 0)
        at = _aligned(at + blob.nbytes)
    done, total = 0, sum(blob.nbytes for blob in blobs.values())

    def write(name: str) -> int:
        whole, checksum = _bytes_view(blobs[name]), 0
        for first in range(0, len(whole), _CHUNK_BYTES):
            chunk = whole[first : first + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            _write_at(file, chunk, places[name].start + first)
        return checksum

    names = sorted(blobs, key=lambda name: -blobs[name].nbytes)  # the largest first, so that no thread ends late
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, ExitStack() as undo:
        undo.callback(pool.shutdown, cancel_futures=True)
        for name, checksum in zip(names, pool.map(write, names), strict=True):
            places[name] = replace(places[name], checksum=checksum)
            done += blobs[name].nbytes
            progress(done, total)
    os.ftruncate(file, at)
    header = _header(about, places)
    _write_at(file, MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(8, "little") + header, 0)
    return at


def _header(about: Mapping[str, Any], blobs: Mapping[str, Blob]) -> bytes:
    listed = {name: f"{blob.start:016x} {blob.nbytes:016x} {blob.checksum:08x}" for name, blob in blobs.items()}
    return json.dumps({**about, "blobs": listed}).encode()


def _write_at(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _bytes_view(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes; valid as long as the caller holds the tensor."""
    assert tensor.is_contiguous(), "a blob must be contiguous"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


# ---- reading --------------------------------------------------------------------------------------------------------


class PackReader:
    """An open pack with a verified header; each blob is verified when it is read."""

    def __init__(self, file: int, blobs: Mapping[str, Blob], notes: PackNotes | None = None) -> None:
        self._file, self.blobs, self.size = file, blobs, os.fstat(file).st_size
        self.notes = notes or PackNotes()

    def read(self, name: str) -> Tensor:
        """Return a blob as uint8 in private memory, on huge pages if it is large. Raises `FileUnusable`."""
        blob = self.blobs[name]
        target, checksum = allocate_packed(blob.nbytes), 0
        view = _bytes_view(target)
        for first in range(0, blob.nbytes, _CHUNK_BYTES):
            chunk = view[first : first + _CHUNK_BYTES]
            self._fill(chunk, blob.start + first)
            checksum = zlib.crc32(chunk, checksum)
        _check(name, checksum, blob)
        return target

    def mapping(self) -> Callable[[str], Tensor]:
        """Return a function like `read` whose tensors are views of the mapped file, which processes share."""
        region = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        # On Linux with large folios in the file system, reading and mapping 656 MB took 0.6 s instead of 2.4.
        advise(region, "MADV_HUGEPAGE")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # read-only on purpose
            whole = torch.frombuffer(region, dtype=torch.uint8)

        def mapped(name: str) -> Tensor:
            blob = self.blobs[name]
            part = whole[blob.start : blob.start + blob.nbytes]
            _check(name, zlib.crc32(_bytes_view(part)), blob)
            return part

        return mapped

    def close(self) -> None:
        os.close(self._file)

    def _fill(self, chunk: memoryview, at: int) -> None:
        while chunk:
            count = os.preadv(self._file, [chunk], at)
            if count == 0:
                raise FileUnusable("it became shorter while it was read")
            chunk, at = chunk[count:], at + count


def open_pack(file: Path, key: Mapping[str, str]) -> PackReader:
    """Open a pack and verify its header. Raises `FileNotFoundError` or `FileUnusable`."""
    descriptor = open_trusted(file)
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        header = _read_header(descriptor)
        if header["key"] != dict(key):
            raise FileUnusable("it was made for another checkpoint, recipe or version")
        pack = PackReader(descriptor, _blobs(descriptor, header), PackNotes.from_json(header))
        undo.pop_all()
        return pack


def read_key(file: Path) -> Mapping[str, str]:
    """Return the key of a pack. Raises `FileUnusable` or `OSError`."""
    descriptor = open_trusted(file)
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


@dataclass(frozen=True, slots=True)
class PackFolder:
    """The folder of pack files.

    `mapped`: weights stay in the mapped file, shared with other processes, instead of being read into private memory.
    With huge pages (Linux, ext4), products take equally long and a start is several times faster.
    """

    folder: Path
    write_progress: Progress
    mapped: bool = True

    def open(self, checkpoint: Checkpoint, choice: FormChoice, layers: Sequence[LayerPacking]) -> PackFile | None:
        """Return the pack file of this choice of forms, which may not exist; None if no form can be kept."""
        if not any(True for layer in layers for _ in layer.blob_bytes()):
            return None
        began = time.monotonic()
        content = checkpoint_fingerprint(checkpoint, self.folder / PACKS, torch.get_num_threads())
        log.debug("the checkpoint is %s (%.1f s)", content, time.monotonic() - began)
        return PackFile(self, {"checkpoint": content, "choice": repr(choice), **_platform_key()})


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The blobs of a pack, uint8 and all verified, and its notes."""

    blobs: Mapping[str, Tensor]
    notes: PackNotes


class PackFile:
    """One pack file: `file` is its path, existing or not; `size` its bytes, None if not kept; `found`: it existed."""

    def __init__(self, packs: PackFolder, key: Mapping[str, str]) -> None:
        """Compute the path from `key`."""
        self._packs, self.key = packs, key
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.file = packs.folder / PACKS / f"{digest[:32]}.pack"
        self.size: int | None = None
        self.found = False

    def read(self, blob_bytes: BlobBytes, progress: Progress) -> PackedWeights | None:
        """Return the kept weights, or None; `blob_bytes` maps upgraded sources to blobs that the file must contain."""
        try:
            pack = open_pack(self.file, self.key)
        except FileNotFoundError:
            self._log_other_keys()
            return None
        except (OSError, FileUnusable) as error:
            self._warn(error)
            return None
        try:
            wanted = blob_bytes(pack.notes.upgraded)
            if {name: blob.nbytes for name, blob in pack.blobs.items()} != dict(wanted):
                raise FileUnusable("it holds other weights")
            blobs = _read_all(wanted, progress, pack.mapping() if self._packs.mapped else pack.read)
            self.size, self.found = pack.size, True
            return PackedWeights(blobs, pack.notes)
        except (OSError, FileUnusable) as error:
            self._warn(error)
            return None
        finally:
            pack.close()

    def write(self, blobs: Mapping[str, Tensor], notes: PackNotes) -> None:
        """Write the blobs for the next start, or log a warning."""
        try:
            self.size = write_pack(self.file, self.key, blobs, self._packs.write_progress, notes)
        except OSError as error:
            log_not_kept(self.file, "the packed weights", error)
        else:
            log.info("kept %d MiB of packed weights in %s", self.size >> 20, self.file)

    def _log_other_keys(self) -> None:
        """Log that packs of this checkpoint exist for another architecture or version. They are left for it."""
        others = []
        for file in self.file.parent.glob("*.pack"):
            with suppress(OSError, FileUnusable):
                others.append(read_key(file))
        differ = differences(self.key, [key for key in others if key.get("checkpoint") == self.key["checkpoint"]])
        if differ:
            log.info(
                "packs of this model in %s differ in %s: they are not used and stay there", self.file.parent, differ
            )

    def _warn(self, error: Exception) -> None:
        log.warning("the packed weights in %s cannot be used (%s): packing again", self.file, error)


def _read_all(blob_bytes: Mapping[str, int], progress: Progress, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    done, total, blobs = 0, sum(blob_bytes.values()), {}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, blob in zip(blob_bytes, pool.map(read, blob_bytes), strict=True):
            blobs[name] = blob
            done += blob_bytes[name]
            progress(done, total)
    return blobs


def _platform_key() -> dict[str, str]:
    text = hashlib.sha256()
    for module in _QUANTIZATION_MODULES:
        text.update(Path(str(module.__file__)).read_bytes())
    return {
        "format": str(FORMAT),
        "version": VERSION,
        "text": text.hexdigest(),
        "architecture": host_architecture(),
        "block": str(native_library().block),
    }
