"""The prompt cache: keys and values of earlier prompts in files, which survive the process.

Blocks of tokens are written while the worker has nothing to compute, and at the end of the process. They are read
between steps, into the slot of a sequence that was just admitted or is being prefilled, in place of computing them, as
long as that is faster. `prefix_files.py` has the files.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from pathlib import Path

import torch

from app.engine.build import BuildRequest
from app.engine.decoder.kv_cache import KvCache
from app.engine.decoder.prefix_files import PrefixFiles, PrefixNames
from app.engine.scheduler.batch import KvCopy, Sequence
from app.engine.scheduler.kv_allocator import KvSlot
from app.metrics.step_time_model import StepTimeModel
from app.version import VERSION
from app.weights.cache_file import PACKS, checkpoint_fingerprint
from app.weights.checkpoint import Checkpoint
from app.weights.form_choice import form_choice
from armature_kernels.native.library import native_library

BLOCK_TOKENS = 128  # of a file: 3 MB for a model of 135M parameters, 15 MB for one of 1.7B
MOST_PROMPTS = 64  # whose names are held
_READ_GAIN = 0.3  # weight of a new measurement in the time of reading a block
# Each time that computing is preferred, the estimate shrinks by this factor, so that reading is tried again.
_FORGET_FACTOR = 0.95


class PromptCache:
    """The `PrefixStore` of a CPU. It is used on the worker thread only."""

    def __init__(
        self, files: PrefixFiles, kv_cache: KvCache, step_times: StepTimeModel, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.files = files
        self.read_seconds = 0.0  # usual time of reading a block; 0: not measured yet
        self._kv_cache, self._step_times, self._block_tokens = kv_cache, step_times, block_tokens
        self._rows = torch.empty(block_tokens * kv_cache.bytes_per_token, dtype=torch.uint8)
        self._view = memoryview((ctypes.c_char * self._rows.nbytes).from_address(self._rows.data_ptr())).cast("B")
        self._names: dict[Sequence, PrefixNames] = {}  # the one that was read last at the end
        self._saved: dict[int, int] = {}  # slot to the time of its last use, as far as its blocks are kept

    def move(self, copies: Items[KvCopy], released: Items[tuple[int, int, int]]) -> None:
        """Do the copies and releases of a batch now."""
        self._kv_cache.move(copies, released)

    def read(self, sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """Read the blocks that follow a sequence's computed tokens, as `PrefixStore.read` says."""
        assert sequence.slot is not None, "only a running sequence reads a prefix"
        if sequence.adapter is not None:  # files have no names of adapters' weights
            return sequence.num_computed, False
        computed, limit, size = sequence.num_computed, sequence.max_cached_tokens, self._block_tokens
        began = last = time.perf_counter()
        for block in self._names_of(sequence).blocks(sequence.token_ids, computed // size):
            start, end = block.index * size, min((block.index + 1) * size, limit)
            if end <= computed or not self._is_worth(computed, end - computed):
                break
            if last - began > max_seconds:
                return computed, self.files.contains(block)
            if not self.files.read(block, self._view):
                break
            self._kv_cache.write_block(self._rows, sequence.slot, start, computed, end)
            computed, now = end, time.perf_counter()
            gain = _READ_GAIN if self.read_seconds else 1.0
            self.read_seconds += gain * (now - last - self.read_seconds)
            last = now
        return computed, False

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
                self._kv_cache.read_block(self._rows, slot.index, slot.prefix_slot, slot.prefix_tokens, start)
                if not self.files.write(block, self._view):
                    break
            self._saved[slot.index] = slot.used_at

    def _names_of(self, sequence: Sequence) -> PrefixNames:
        """Return the names of a sequence's blocks, which a prompt has had since its first step."""
        if sequence.num_completion_tokens:  # it was preempted; tokens of beams change
            return self.files.names(self._block_tokens, sequence.cache_salt)
        names = self._names.pop(sequence, None) or self.files.names(self._block_tokens, sequence.cache_salt)
        self._names[sequence] = names
        if len(self._names) > MOST_PROMPTS:
            del self._names[next(iter(self._names))]
        return names

    def _is_worth(self, computed: int, tokens: int) -> bool:
        """Return True if reading a block is expected to be faster than computing this number of its tokens."""
        times = self._step_times.step_times(self._block_tokens)
        if times is None or self.read_seconds <= times.seconds(0, tokens, 0, computed):
            return True
        self.read_seconds *= _FORGET_FACTOR
        return False


def open_prompt_cache(
    request: BuildRequest[Checkpoint], kv_cache: KvCache, max_queries_together: int | None
) -> PromptCache | None:
    """Return the prompt cache that the plan asks for, or None.

    `max_queries_together` is that of the runner: keys and values of other runners differ in their last bits.

    Raises:
        SettingsInvalid: The folder cannot be used.
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
        "block": str(BLOCK_TOKENS),
        "version": VERSION,
    }
    files = PrefixFiles(folder, identity, plan.steps.prompt_cache_bytes)
    return PromptCache(files, kv_cache, request.step_time_model)
