"""The prompt cache: keys and values of earlier prompts in files, which survive the process.

Blocks of tokens are written while the worker has nothing to compute, and at the end of the process. They are read
between steps, into the slot of a sequence that was just admitted or is being prefilled, in place of computing them, as
long as that is faster. A file is a
header, the token ids of the whole prefix (int32), and the rows of the block. It is read only if no other user could
have written it, if its sizes and checksums are right, and if its token ids are the prompt's. So neither a damaged file
nor a collision of hashes can give a prompt the keys and values of another one. Files appear at once and are never
changed, so several servers may share a folder.

A recurrent state is in a file of its own, after the rows of the tokens that follow the last whole block before it.
Reading then ends at a state, and without one no block is of use.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from app.engine.build import BuildRequest
from app.engine.decoder.kv_cache import KvCache
from app.engine.scheduler.batch import KvCopy, Sequence, StateCopy
from app.engine.scheduler.kv_allocator import KvSlot
from app.errors import SettingsInvalid
from app.metrics.steps import StepTimeModel
from app.version import VERSION
from app.weights.cache_file import PACKS, FileUnusable, atomic_write, checkpoint_fingerprint, open_trusted
from app.weights.checkpoint import Checkpoint
from app.weights.form_choice import form_choice
from armature_kernels.native.library import native_library

log = logging.getLogger(__name__)

MAGIC = b"armature prefix 1\n"
SUFFIX = ".prefix"
_FOLDER = "prefixes"  # inside the given folder, which may be a mounted volume with permissions of its own
# Digest of the identity, tokens of the prefix, bytes of the rows, their checksum with the tokens', and the header's.
_HEADER = struct.Struct("<32sQQII")
_BEGIN = len(MAGIC) + _HEADER.size
_TOKEN_BYTES = 4
# After each removal this part of the bound is free, so that files are not listed for each new one.
_FREE_DIVISOR = 20
_CHUNK_BYTES = 2**20  # bytes written or verified at a time
_RECENT_STEP_NANOSECONDS = 1000  # between the times of use of the blocks of one prefix
_STATE = b"state"  # in the identity of a state's file
BLOCK_TOKENS = 128  # of a file: 3 MB for a model of 135M parameters, 15 MB for one of 1.7B
MOST_PROMPTS = 64  # whose names are held
_READ_GAIN = 0.3  # weight of a new measurement in the time of reading a block
# Each time that computing is preferred, the estimate shrinks by this factor, so that reading is tried again.
_FORGET_FACTOR = 0.95


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """Block `index` of a prompt: the name of its file, and the bytes of all token ids up to its end.

    A state's index is that of the block in which it is, or after which.
    `identity` is that of its file. `used_at` is in nanoseconds; the first block of a prompt counts as used last, since
    the others are of no use without it.
    """

    index: int
    name: str
    token_bytes: memoryview
    identity: bytes
    used_at: int


class PrefixNames:
    """The blocks of a list of tokens that only grows: each is hashed once, however often it is asked for."""

    def __init__(self, identity: bytes, block_tokens: int) -> None:
        self._identity, self._digest, self._block_tokens = identity, hashlib.sha256(identity), block_tokens
        self._names: list[str] = []
        self._content = b""  # of the tokens so far
        self.admission = 0  # of its sequence, of which the next two are
        self.state: PrefixBlock | None = None  # the last one that may be read
        self.read_end = 0  # keys and values up to here were read

    def blocks(self, token_ids: list[int], first: int) -> Iterator[PrefixBlock]:
        """Yield the whole blocks of these tokens, from block `first` on, as used now."""
        now, size = time.time_ns(), self._block_tokens * _TOKEN_BYTES
        held, count = len(self._content) // _TOKEN_BYTES, len(token_ids) // self._block_tokens
        if (end := count * self._block_tokens) > held:
            self._content += struct.pack(f"<{end - held}i", *token_ids[held:end])
        content = memoryview(self._content)
        for index in range(first, count):
            while len(self._names) <= index:
                start = len(self._names) * size
                self._digest.update(content[start : start + size])
                self._names.append(self._digest.hexdigest()[:40] + SUFFIX)
            used_at = now - index * _RECENT_STEP_NANOSECONDS
            yield PrefixBlock(index, self._names[index], content[: (index + 1) * size], self._identity, used_at)

    def states(self, token_ids: list[int], first: int, end: int) -> Iterator[PrefixBlock]:
        """Yield the state after each position from `end` down to `first`, at least 1, as used now."""
        content, now = memoryview(struct.pack(f"<{end}i", *token_ids[:end])), time.time_ns()
        identity = hashlib.sha256(self._identity + _STATE).digest()
        digest, names, done = hashlib.sha256(identity), [], 0
        for position in range(first, end + 1):
            digest.update(content[done * _TOKEN_BYTES : position * _TOKEN_BYTES])
            names.append(digest.copy().hexdigest()[:40] + SUFFIX)
            done = position
        for position in range(end, first - 1, -1):
            index, known = position // self._block_tokens, content[: position * _TOKEN_BYTES]
            used_at = now - index * _RECENT_STEP_NANOSECONDS
            yield PrefixBlock(index, names[position - first], known, identity, used_at)


class PrefixFiles:
    """The folder of one model's blocks.

    `identity` is all that keys and values depend on besides the tokens. All files in the folder, of whatever model,
    take at most `max_bytes`.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], max_bytes: int) -> None:
        """Create the folder. Raises `SettingsInvalid` if it cannot be used."""
        self.folder = private_folder(folder / _FOLDER)
        self._identity = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).digest()
        self._max_bytes = max_bytes
        self._stored_bytes: int | None = None  # None: not counted yet
        self._touched: set[str] = set()  # used since `begin`; they are not removed
        self.disabled_reason = ""  # reason why nothing is written any more; empty if files are written

    def names(self, block_tokens: int, salt: str | None = None) -> PrefixNames:
        """Return the names of the blocks of one list of tokens, which only lists with the same salt share."""
        if salt is None:
            return PrefixNames(self._identity, block_tokens)
        salted = hashlib.sha256(self._identity + salt.encode("utf-8", "surrogatepass"))
        return PrefixNames(salted.digest(), block_tokens)

    def read(self, block: PrefixBlock, rows: memoryview) -> bool:
        """Read a block into `rows`; False if there is none, or a file that is unusable and now removed."""
        file = self.folder / block.name
        try:
            descriptor = open_trusted(file)
            try:
                found = self._read(descriptor, block, rows)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return False
        except (OSError, FileUnusable) as error:
            log.warning("the file %s of the prompt cache cannot be used (%s): it is removed", file, error)
            with suppress(OSError):
                file.unlink()
            return False
        if found:
            self.touch(block)
        return found

    def _read(self, descriptor: int, block: PrefixBlock, rows: memoryview) -> bool:
        """Return True if the file holds this block; `FileUnusable` if it is damaged."""
        begin = os.pread(descriptor, _BEGIN, 0)
        if len(begin) < _BEGIN or begin[: len(MAGIC)] != MAGIC:
            raise FileUnusable("it is no whole file of this version")
        identity, token_bytes, row_bytes, checksum, own = _HEADER.unpack(begin[len(MAGIC) :])
        if zlib.crc32(begin[:-4]) != own:
            raise FileUnusable("its header is damaged")
        if os.fstat(descriptor).st_size != _BEGIN + token_bytes + row_bytes:
            raise FileUnusable("it has been cut short")
        if (identity, token_bytes, row_bytes) != (block.identity, block.token_bytes.nbytes, rows.nbytes):
            return False
        tokens = bytearray(token_bytes)
        found = _fill(descriptor, memoryview(tokens), _BEGIN, 0)
        same = tokens == block.token_bytes
        if same:
            found = _fill(descriptor, rows, _BEGIN + token_bytes, found)
            if found != checksum:
                raise FileUnusable("its content is damaged")
        return same

    def contains(self, block: PrefixBlock) -> bool:
        return (self.folder / block.name).exists()

    def touch(self, block: PrefixBlock) -> None:
        self._touched.add(block.name)
        with suppress(OSError):  # another server has removed it
            os.utime(self.folder / block.name, ns=(block.used_at, block.used_at))

    def begin(self) -> None:
        """Begin to write: blocks that are used from now on are not removed for other ones."""
        self._touched.clear()
        self._stored_bytes = None

    def write(self, block: PrefixBlock, rows: memoryview) -> bool:
        if self.disabled_reason:
            return False
        size = _BEGIN + block.token_bytes.nbytes + rows.nbytes
        try:
            if not self._make_room(size):
                return False
            with atomic_write(self.folder / block.name, mode=0o600, durable=False) as stream:
                self._write(stream, block, rows)
        except OSError as error:
            self.disabled_reason = error.strerror or str(error)
            log.warning("prompts are no longer kept in %s (%s): serving goes on", self.folder, self.disabled_reason)
            return False
        self._stored_bytes = (self._stored_bytes or 0) + size
        self.touch(block)
        return True

    def _write(self, stream: FileIO, block: PrefixBlock, rows: memoryview) -> None:
        checksum = zlib.crc32(rows, zlib.crc32(block.token_bytes))
        fields = block.identity, block.token_bytes.nbytes, rows.nbytes, checksum
        header = MAGIC + _HEADER.pack(*fields, 0)[:-4]
        for part in (header + struct.pack("<I", zlib.crc32(header)), block.token_bytes, rows):
            left = memoryview(part)
            while left:
                left = left[stream.write(left[:_CHUNK_BYTES]) or 0 :]

    def _make_room(self, size: int) -> bool:
        if self._stored_bytes is not None and self._stored_bytes + size <= self._max_bytes:
            return True
        files = sorted(self._files())
        total = sum(found for _, found, _ in files)
        wanted = self._max_bytes - (
            size if total + size <= self._max_bytes else max(size, self._max_bytes // _FREE_DIVISOR)
        )
        for _, found, file in files:
            if total <= wanted:
                break
            if file.name not in self._touched:
                file.unlink(missing_ok=True)
                total -= found
        self._stored_bytes = total
        return total + size <= self._max_bytes

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of last use, the bytes and the path of each file."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):  # another server has removed it
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_size, Path(entry.path)


def _fill(descriptor: int, target: memoryview, at: int, checksum: int) -> int:
    view, filled = target.cast("B"), 0
    while filled < len(view):
        chunk = view[filled : filled + _CHUNK_BYTES]
        count = os.preadv(descriptor, [chunk], at + filled)
        if count == 0:
            raise FileUnusable("it became shorter while it was read")
        checksum = zlib.crc32(chunk[:count], checksum)
        filled += count
    return checksum


def private_folder(folder: Path) -> Path:
    """Return the folder, made if needed, for this process's user alone. Raises `SettingsInvalid` if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise SettingsInvalid(
            f"prompt_cache: {folder} cannot be used ({error.strerror}): give a writable folder."
        ) from error
    if status.st_uid != os.getuid():
        raise SettingsInvalid(
            f"prompt_cache: {folder} belongs to user {status.st_uid}, and keys and values of prompts are only kept in a "
            "folder of the server's own user: give another folder."
        )
    if status.st_mode & 0o077:
        raise SettingsInvalid(
            f"prompt_cache: other users can enter {folder} (mode {status.st_mode & 0o777:o}), and prompts can be recovered "
            f"from what is kept there: run chmod 700 {folder}, or give another folder."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsInvalid(f"prompt_cache: {folder} cannot be written: give a writable folder.")
    return folder


class PromptCache:
    """The `PrefixStore` of a CPU. It is used on the worker thread only."""

    def __init__(
        self, files: PrefixFiles, kv_cache: KvCache, step_times: StepTimeModel, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.files = files
        self.read_seconds = 0.0  # usual time of reading a block; 0: not measured yet
        self._kv_cache, self._step_times, self._block_tokens = kv_cache, step_times, block_tokens
        self._block_bytes = block_tokens * kv_cache.bytes_per_token
        self._rows = torch.empty(self._block_bytes + kv_cache.state_bytes, dtype=torch.uint8)
        self._view = memoryview((ctypes.c_char * self._rows.nbytes).from_address(self._rows.data_ptr())).cast("B")
        self._names: dict[Sequence, PrefixNames] = {}  # the one that was read last at the end
        self._saved: dict[int, int] = {}  # slot to the time of its last use, as far as its blocks are kept

    def move(self, copies: Items[KvCopy], released: Items[tuple[int, int, int]], states: Items[StateCopy]) -> None:
        self._kv_cache.copy_states(states)
        self._kv_cache.move(copies, released)

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """Read the blocks that follow a sequence's computed tokens (`PrefixStore.read`)."""
        assert sequence.slot is not None, "only a running sequence reads a prefix"
        if sequence.adapter is not None:  # files have no names of adapters' weights
            return sequence.num_computed, False
        names, limit = self._names_of(sequence), sequence.max_cached_tokens
        if self._kv_cache.states:
            return self._read_state(sequence, names, max_seconds)
        return self._read_blocks(sequence, names, sequence.num_computed, limit, max_seconds)

    def _read_blocks(
        self, sequence: Sequence, names: PrefixNames, computed: int, limit: int, max_seconds: float
    ) -> tuple[int, bool]:
        """Read blocks while that is worth it, up to position `limit`; return as `read` does."""
        assert sequence.slot is not None, "only a running sequence reads a prefix"
        size, began = self._block_tokens, time.perf_counter()
        last = began
        for block in names.blocks(sequence.token_ids, computed // size):
            start, end = block.index * size, min((block.index + 1) * size, limit)
            if end <= computed or not self._is_worth(computed, end - computed):
                break
            if last - began > max_seconds:
                return computed, self.files.contains(block)
            if not self.files.read(block, self._view[: self._block_bytes]):
                break
            self._kv_cache.write_block(self._rows[: self._block_bytes], sequence.slot, start, computed, end)
            computed, now = end, time.perf_counter()
            gain = _READ_GAIN if self.read_seconds else 1.0
            self.read_seconds += gain * (now - last - self.read_seconds)
            last = now
        return computed, False

    def _read_state(self, sequence: Sequence, names: PrefixNames, max_seconds: float) -> tuple[int, bool]:
        """Read the last state that is kept, and before it keys and values, whose blocks may take several steps."""
        assert sequence.slot is not None, "only a running sequence reads a prefix"
        computed, size = sequence.num_computed, self._block_tokens
        if names.admission != sequence.num_admitted:
            names.admission, names.read_end = sequence.num_admitted, 0
            names.state = self._last_state(sequence, names)
        state = names.state
        end = 0 if state is None else state.token_bytes.nbytes // _TOKEN_BYTES
        if state is None or end <= computed:
            return computed, False
        whole, known = end // size * size, max(computed, names.read_end)
        if known < whole:
            known, has_more = self._read_blocks(sequence, names, known, whole, max_seconds)
            names.read_end = known
            if has_more:
                return computed, True
        rows = self._kv_cache.bytes_per_token * (end - whole)
        num_bytes = rows + self._kv_cache.state_bytes
        names.state = None  # it is read now or never
        if known < whole or not self.files.read(state, self._view[:num_bytes]):
            return computed, False
        if known < end:
            self._kv_cache.write_block(self._rows[:rows], sequence.slot, whole, known, end)
        self._kv_cache.state(sequence.slot).copy_(self._rows[rows:num_bytes])
        return end, False

    def _last_state(self, sequence: Sequence, names: PrefixNames) -> PrefixBlock | None:
        """Return the last state after the computed tokens that has a file and all blocks before it, if it is worth reading."""
        computed, limit, size = sequence.num_computed, sequence.max_cached_tokens, self._block_tokens
        first, end = max(computed + 1, size), min((computed // size + 1) * size - 1, limit)
        for block in names.blocks(sequence.token_ids, computed // size):
            if not self.files.contains(block):
                break
            end = min((block.index + 2) * size - 1, limit)
        if end < first:
            return None
        for state in names.states(sequence.token_ids, first, end):
            tokens = state.token_bytes.nbytes // _TOKEN_BYTES - computed
            if self.files.contains(state):
                blocks = tokens / size + self._kv_cache.state_bytes / max(1, self._block_bytes)
                return state if self._is_worth(computed, tokens, blocks) else None
        return None

    def save(self, slots: Iterable[KvSlot], is_wanted: Callable[[], bool]) -> None:
        """Write the blocks of cached slots that are not kept yet, the most recently used slot first."""
        self.files.begin()
        for slot in sorted(slots, key=lambda slot: -slot.used_at):
            if slot.running or slot.num_tokens < self._block_tokens or self._saved.get(slot.index) == slot.used_at:
                continue
            if slot.scope.adapter is not None:
                continue
            names = self.files.names(self._block_tokens, slot.scope.salt)
            for block in names.blocks(slot.token_ids[: slot.num_tokens], 0):
                if is_wanted():
                    return
                if self.files.contains(block):
                    self.files.touch(block)
                    continue
                start = block.index * self._block_tokens
                self._read_slot(slot, start, self._block_bytes)
                if not self.files.write(block, self._view[: self._block_bytes]):
                    break
            if self._kv_cache.states and not self._save_states(slot, names, is_wanted):
                return
            self._saved[slot.index] = slot.used_at

    def _read_slot(self, slot: KvSlot, start: int, num_bytes: int) -> None:
        rows = self._rows[:num_bytes]
        self._kv_cache.read_block(rows, slot.index, slot.prefix_slot, slot.prefix_tokens, start)

    def _save_states(self, slot: KvSlot, names: PrefixNames, is_wanted: Callable[[], bool]) -> bool:
        """Write the states of a cached slot that are not kept yet; False if that is not wanted any more."""
        for position in sorted(slot.states(), reverse=True):
            row, start = slot.state_row(position), position // self._block_tokens * self._block_tokens
            if row is None or not start:  # a prompt of less than a block is computed
                continue
            if is_wanted():
                return False
            (state,) = names.states(slot.token_ids, position, position)
            if self.files.contains(state):
                self.files.touch(state)
                continue
            rows = self._kv_cache.bytes_per_token * (position - start)
            if rows:
                self._read_slot(slot, start, rows)
            num_bytes = rows + self._kv_cache.state_bytes
            self._rows[rows:num_bytes].copy_(self._kv_cache.state(row))
            if not self.files.write(state, self._view[:num_bytes]):
                break
        return True

    def _names_of(self, sequence: Sequence) -> PrefixNames:
        if sequence.is_beam and sequence.num_completion_tokens:  # it was preempted; tokens of beams change
            return self.files.names(self._block_tokens, sequence.cache_salt)
        names = self._names.pop(sequence, None) or self.files.names(self._block_tokens, sequence.cache_salt)
        self._names[sequence] = names
        if len(self._names) > MOST_PROMPTS:
            del self._names[next(iter(self._names))]
        return names

    def _is_worth(self, computed: int, tokens: int, blocks: float = 1.0) -> bool:
        """Return True if tokens are read in less time than they are computed in; they are so much as `blocks`."""
        times = self._step_times.step_times(self._block_tokens)
        if times is None or blocks * self.read_seconds <= times.seconds(0, tokens, 0, computed):
            return True
        self.read_seconds *= _FORGET_FACTOR
        return False


def open_prompt_cache(
    request: BuildRequest[Checkpoint], kv_cache: KvCache, max_queries_together: int | None
) -> PromptCache | None:
    """Return the prompt cache that the plan asks for, or None. Raises `SettingsInvalid` if its folder is unusable.

    Runners of another `max_queries_together` give keys and values that differ in their last bits.
    """
    plan, checkpoint = request.plan, request.checkpoint
    if plan.steps.prompt_cache is None:
        return None
    request.report("opening the prompt cache")
    folder = Path(plan.steps.prompt_cache)
    notes = folder if plan.weights.pack_folder is None else Path(plan.weights.pack_folder) / PACKS
    identity = {
        "checkpoint": checkpoint_fingerprint(checkpoint, notes, torch.get_num_threads()),
        "weights": repr(form_choice(plan, checkpoint.decoder, None, checkpoint.tensors)),
        "kernels": f"{plan.weights.kernels} {native_library().block}",
        "attention": str(max_queries_together),
        "kv": f"{kv_cache.dtype} {kv_cache.shape.num_layers} {kv_cache.token_bytes}",
        "states": str(kv_cache.shape.state_sizes),
        "block": str(BLOCK_TOKENS),
        "version": VERSION,
    }
    files = PrefixFiles(folder, identity, plan.steps.prompt_cache_bytes)
    return PromptCache(files, kv_cache, request.step_time_model)
