"""Reads a checkpoint's tensors from memory-mapped files: without a copy, some rows at a time, or whole.

The mapping is private and read-only. `check_values` refuses weights that are not finite, and in FP16 those beyond its
maximum of 65,504.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from app.errors import CheckpointInvalid, PlanImpossible, StepFailed, raise_kernel_errors_as
from app.hardware.kernel_advice import advise
from app.weights.checkpoint import Checkpoint
from app.weights.files import open_regular
from app.weights.forms import fp8_block
from app.weights.gguf.blocks import EIGHT_BIT_CODES, FOUR_BIT_CODES, dequantize_blocks
from app.weights.gguf.reader import TYPES
from app.weights.gguf.tensors import BlockEntry
from app.weights.quantized.entries import PackedEntry
from app.weights.quantized.values import decode_rows, fp8_codes, held_codes
from app.weights.safetensors import ColumnsEntry, EncodedEntry, QuantizedEntry, RearrangedEntry, TensorEntry
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.linear.quantization import Int4Weight, Int8Weight
from armature_kernels.linear.torchao_linear import dequantize_rows

TORCH_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART_DTYPES: Mapping[str, torch.dtype] = {
    **TORCH_DTYPES, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32, "U32": torch.int32, "I64": torch.int64,
}  # fmt: skip

_FETCH_BYTES = 8 * 2**20  # the call holds the interpreter's lock, so it must be short
_COPY_BYTES = 8 * 2**20  # bytes of source pages held while a tensor is converted
# Bytes read at a time. Each thread holds one block, and while it quantizes the block its values in FP32 and its codes:
# with 4 MiB, two threads held up to 34 MB beside the weights, with 2 MiB 20 MB; packing took as long.
_BLOCK_BYTES = 2 * 2**20
_E4M3_NAN = 0x7F  # without the sign
_FP16_MAX = torch.finfo(torch.float16).max


class MappedFiles:
    """The checkpoint's files, each mapped on first use. A tensor keeps its mapping alive."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._streams: dict[Path, BinaryIO] = {}
        self._opening = threading.Lock()

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Return the tensor as stored: a view of the file; values that are encoded are computed."""
        if not isinstance(entry, EncodedEntry):
            return self.span(entry, entry.shape)
        values = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        step = max(1, _BLOCK_BYTES * entry.shape[0] // entry.value_bytes)
        for row in range(0, entry.shape[0], step):
            part = values[row : row + step]
            part.copy_(self._decoded(entry, row, row + len(part)))
        return values

    def _decoded(self, entry: EncodedEntry, row: int, end: int) -> Tensor:
        if isinstance(entry, QuantizedEntry):
            parts = {name: self.tensor(part) for name, part in entry.parts}
            with raise_kernel_errors_as(CheckpointInvalid):
                return dequantize_rows(entry.attributes, parts, slice(row, end))
        if isinstance(entry, RearrangedEntry):
            return self._rearranged(entry, row, end)
        if isinstance(entry, ColumnsEntry):
            source = entry.source
            if isinstance(source, EncodedEntry):
                rows = self._decoded(source, row, end)
            else:
                rows = self.span(source, source.shape)[row:end]
            return rows[:, entry.first : entry.first + entry.shape[1]]
        if isinstance(entry, PackedEntry):
            return decode_rows(entry, range(row, end), self.tensor)
        assert isinstance(entry, BlockEntry), "there is no other class of encoded tensors"
        values = dequantize_blocks(entry.kind, self.blocks(entry, row, end)).view(end - row, *entry.shape[1:])
        if entry.columns is not None:
            values = _columns_in_order(values, entry.columns)
        if entry.is_rate:
            return (-values).log()
        return values - entry.added if entry.added else values

    def _rearranged(self, entry: RearrangedEntry, row: int, end: int) -> Tensor:
        numbers = range(row, end) if entry.rows is None else entry.rows[row:end]
        if isinstance(entry.source, EncodedEntry):
            source = entry.source
            found = _rows_in_order(numbers, lambda rows: self._decoded(source, rows.start, rows.stop))
        else:
            stored = self.span(entry.source, entry.source.shape)
            rows = stored.T if entry.transposed else stored.reshape(-1, *entry.shape[1:])
            found = rows[row:end] if entry.rows is None else rows[torch.tensor(numbers)]
        if not entry.factors:
            return found
        factors = torch.cat([torch.full((count,), factor) for count, factor in entry.factors])
        return found.float() * factors[row:end].view(-1, *(1,) * (found.dim() - 1))

    def blocks(self, entry: BlockEntry, row: int, end: int) -> Tensor:
        """Return the blocks of rows `[row, end)` of a tensor in a GGUF file, uint8 [blocks, bytes of a block]."""
        stored = self.span(replace(entry, dtype="U8"), (entry.nbytes // entry.row_bytes, entry.row_bytes))
        rows = slice(row, end) if entry.rows is None else list(entry.rows[row:end])
        return stored[rows].reshape(-1, TYPES[entry.kind].nbytes)

    def span(self, first: TensorEntry, shape: tuple[int, ...]) -> Tensor:
        """Return a view of this shape that starts at the first of entries that are stored end to end."""
        dtype, count = _PART_DTYPES[first.dtype], 1
        for size in shape:
            count *= size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # read-only on purpose
            if first.start % dtype.itemsize:  # kernels need aligned elements, which the format does not guarantee
                unaligned = torch.frombuffer(
                    self._map(first.file), dtype=torch.uint8, count=count * dtype.itemsize, offset=first.start
                )
                return unaligned.clone().view(dtype).view(shape)
            return torch.frombuffer(self._map(first.file), dtype=dtype, count=count, offset=first.start).view(shape)

    def read(self, entry: TensorEntry, row: int, target: Tensor) -> None:
        """Copy rows of a 2-D tensor into `target`, starting at `row`, and convert their dtype if needed.

        The rows are read, not accessed through the mapping: a page table entry for each 4 KiB costs more than the copy
        (2.4 GB took 1.6 s mapped and 0.3 s read).
        """
        rows, columns = target.shape
        if isinstance(entry, EncodedEntry):
            target.copy_(self._decoded(entry, row, row + rows))
            return
        stored = TORCH_DTYPES[entry.dtype]
        direct = stored == target.dtype and target.is_contiguous()
        buffer = target if direct else torch.empty(rows, columns, dtype=stored)
        view = memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")
        offset, done = entry.start + row * columns * stored.itemsize, 0
        while done < len(view):  # a read may return early; it releases the interpreter's lock
            count = os.preadv(self._descriptor(entry.file), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointInvalid(f"{entry.file.name} became shorter while it was read. Was it being replaced?")
            done += count
        if not direct:
            target.copy_(buffer)

    def fetch(self, file: Path, start: int, end: int) -> None:
        """Read these bytes ahead of a kernel, one call per 8 MiB instead of a page fault per 16 pages."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(first, end, _FETCH_BYTES):
            if not advise(self._map(file), "MADV_POPULATE_READ", at, min(_FETCH_BYTES, end - at)):
                return  # an older kernel does not support it; page faults do the same, slower

    def drop(self, file: Path, start: int, end: int) -> None:
        """Release the pages within `[start, end)` of the file; reading them again costs a page fault."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, end // page * page
        if first < last:
            advise(self._map(file), "MADV_DONTNEED", first, last - first)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._streams:
                self._streams[file] = open_regular(file)
            return self._streams[file].fileno()

    def _map(self, file: Path) -> mmap.mmap:
        with self._opening:
            mapped = self._maps.get(file)
            if mapped is None:
                with open_regular(file) as stream:
                    mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                self._maps[file] = mapped
            return mapped


class TensorReader:
    """The mapped files, and one buffer per thread that is used for all fused and converted tensors."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.tensors, self.files = tensors, MappedFiles()
        self._local = threading.local()

    def entries(self, sources: Sequence[str], kind: str = "weight") -> list[TensorEntry]:
        return [self.tensors[f"{source}.{kind}"] for source in sources]

    def stored(self, entry: TensorEntry) -> Tensor:
        return self.files.tensor(entry)

    def resident(self, entry: TensorEntry, device: torch.device | None) -> Tensor:
        """Return the tensor as stored: mapped on the host, or copied to a device."""
        if device is None:
            return self.stored(entry)
        if len(entry.shape) != 2:
            return self.stored(entry).to(device, copy=True)
        table = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=device)
        for first, rows in self.row_blocks((entry,)):
            table[first : first + len(rows)].copy_(rows)
        return table

    def row_blocks(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of the stacked entries, as stored; each is valid until the next.

        The buffer fits the processor's cache: neither whole tensors nor mapped pages are held.
        """
        first = 0
        for entry in entries:
            for rows in row_ranges(entry):
                yield first + rows.start, self.block(entry, rows)
            first += entry.shape[0]

    def block(self, entry: TensorEntry, rows: range) -> Tensor:
        """Return these rows as stored, valid until this thread reads its next block."""
        block = self._buffer_view((len(rows), entry.shape[1]), TORCH_DTYPES[entry.dtype])
        self.files.read(entry, rows.start, block)
        return block

    def stored_codes(self, entry: TensorEntry, rows: range, bits: int) -> Int4Weight | Int8Weight | None:
        """Return the codes of these rows in groups of 32 with BF16 scales; None if a form of these bits has none."""
        if isinstance(entry, RearrangedEntry):
            if entry.factors or entry.transposed:
                return None
            source, numbers = entry.source, rows if entry.rows is None else entry.rows[rows.start : rows.stop]
            return _codes_in_order(numbers, lambda run: self.stored_codes(source, run, bits))
        if isinstance(entry, PackedEntry):
            return held_codes(entry, rows, self.files.tensor, bits)
        return self.four_bit_codes(entry, rows) if bits == 4 else self._eight_bit_codes(entry, rows)

    def fp8_codes(self, entry: TensorEntry, rows: range) -> tuple[Tensor, Tensor]:
        """Return the codes of these rows as uint8, and their scales FP32 [rows, blocks of inputs] (`fp8_block`)."""
        if isinstance(entry, ColumnsEntry):
            (codes, scales), block = self.fp8_codes(entry.source, rows), fp8_block(entry.source)
            assert block is not None, "other codes are not kept"
            first, last, width = entry.first, entry.first + entry.shape[1], block[1]
            return codes[:, first:last], scales[:, first // width : -(-last // width)]
        if isinstance(entry, RearrangedEntry):
            source, numbers = entry.source, rows if entry.rows is None else entry.rows[rows.start : rows.stop]
            found, order = [self.fp8_codes(source, run) for run in _runs(numbers)], _order(numbers)
            return torch.cat([one for one, _ in found])[order], torch.cat([one for _, one in found])[order]
        assert isinstance(entry, PackedEntry), "other entries have no such codes"
        codes, scales = fp8_codes(entry, rows, self.files.tensor)
        return codes.view(torch.uint8), scales

    def _eight_bit_codes(self, entry: TensorEntry, rows: range) -> Int8Weight | None:
        if not isinstance(entry, BlockEntry) or entry.kind not in EIGHT_BIT_CODES or _splits_groups(entry):
            return None
        found = EIGHT_BIT_CODES[entry.kind](self.files.blocks(entry, rows.start, rows.stop))
        codes, scales = (
            _columns_in_order(part.reshape(len(rows), -1), entry.columns)
            for part in (found.codes, found.scales.to(torch.bfloat16))
        )
        return Int8Weight(codes, scales)

    def four_bit_codes(self, entry: TensorEntry, rows: range) -> Int4Weight | None:
        """Return the codes of these rows with BF16 scales; None if the file has none of four bits."""
        if not isinstance(entry, BlockEntry) or entry.kind not in FOUR_BIT_CODES or _splits_groups(entry):
            return None
        found = FOUR_BIT_CODES[entry.kind](self.files.blocks(entry, rows.start, rows.stop))
        codes, group = found.codes.reshape(len(rows), -1), found.codes.shape[-1]
        codes = _columns_in_order(codes, entry.columns)
        scales, minimums = (
            None if part is None else _columns_in_order(part.to(torch.bfloat16).reshape(len(rows), -1), entry.columns)
            for part in (found.scales, found.minimums)
        )
        assert scales is not None, "codes have scales"
        return Int4Weight(codes, scales, minimums, group, entry.shape[1])

    def whole(self, entries: Sequence[TensorEntry], dtype: torch.dtype, keep: bool) -> tuple[Tensor, bool]:
        """Return the stacked entries in `dtype`, and True if they are a view of the mapped file.

        That is so if they are stored end to end in this dtype. With `keep`, the shared buffer is not used.
        """
        shape = (sum(entry.shape[0] for entry in entries), entries[0].shape[1])
        encoded = any(isinstance(entry, EncodedEntry) for entry in entries)
        if TORCH_DTYPES[entries[0].dtype] == dtype and not encoded and _are_contiguous(entries):
            self.files.fetch(entries[0].file, entries[0].start, entries[-1].end)
            return self.files.span(entries[0], shape), True
        weight = torch.empty(shape, dtype=dtype) if keep else self._buffer_view(shape, dtype)
        row = 0
        for entry in entries:
            self._copy(entry, weight[row : row + entry.shape[0]])
            row += entry.shape[0]
        return weight, False

    def bias(self, sources: Sequence[str], dtype: torch.dtype) -> Tensor:
        return torch.cat([self.stored(entry).to(dtype) for entry in self.entries(sources, "bias")])

    def drop(self, entries: Sequence[TensorEntry]) -> None:
        for entry in entries:
            self.files.drop(entry.file, entry.start, entry.end)

    def close(self) -> None:
        self.files.close()

    def _buffer_view(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        nbytes, local = math.prod(shape) * dtype.itemsize, self._local
        if getattr(local, "buffer", None) is None or local.buffer.numel() < nbytes:
            local.buffer = None  # free the old buffer before allocating the new one
            local.buffer = torch.empty(nbytes, dtype=torch.uint8)
        view: Tensor = local.buffer[:nbytes].view(dtype).view(shape)
        return view

    def _copy(self, entry: TensorEntry, target: Tensor) -> None:
        if isinstance(entry, EncodedEntry):
            step = max(1, _BLOCK_BYTES // entry.shape[1])
            for row in range(0, entry.shape[0], step):
                self.files.read(entry, row, target[row : row + step])
            self.drop((entry,))
            return
        source, row_bytes = self.stored(entry), entry.nbytes // max(1, entry.shape[0])
        step = max(1, _COPY_BYTES // max(1, row_bytes))
        for row in range(0, entry.shape[0], step):
            target[row : row + step].copy_(source[row : row + step])
            self.files.drop(
                entry.file, entry.start + row * row_bytes, entry.start + min(row + step, entry.shape[0]) * row_bytes
            )


def row_ranges(entry: TensorEntry) -> list[range]:
    """Return the blocks of a 2-D tensor's rows that are read at a time; all but the last are multiples of a panel."""
    rows, columns = entry.shape
    step = _BLOCK_BYTES // (columns * TORCH_DTYPES[entry.dtype].itemsize) // PANEL_OUTPUTS * PANEL_OUTPUTS
    return [range(row, min(row + max(step, PANEL_OUTPUTS), rows)) for row in range(0, rows, max(step, PANEL_OUTPUTS))]


def _splits_groups(entry: BlockEntry) -> bool:
    """Return True if the columns of a tensor are in another order within the groups of 32 that have a scale."""
    return entry.columns is not None and entry.shape[1] // len(entry.columns) % 32 != 0


def _columns_in_order(values: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return values [rows, columns] with their groups of columns in another order."""
    return values if order is None else values.view(len(values), len(order), -1)[:, list(order)].flatten(1)


def _runs(numbers: Sequence[int]) -> list[range]:
    """Return the distinct numbers in ascending order, as ranges without gaps."""
    ordered = sorted(set(numbers))
    ends = [at for at in range(1, len(ordered)) if ordered[at] != ordered[at - 1] + 1]
    return [range(ordered[start], ordered[end - 1] + 1) for start, end in pairwise([0, *ends, len(ordered)])]


def _order(numbers: Sequence[int]) -> Tensor:
    """Return the places of numbers among the distinct ones in ascending order."""
    places = {number: place for place, number in enumerate(sorted(set(numbers)))}
    return torch.tensor([places[number] for number in numbers])


def _rows_in_order(numbers: Sequence[int], read: Callable[[range], Tensor]) -> Tensor:
    return torch.cat([read(run) for run in _runs(numbers)])[_order(numbers)]


def _codes_in_order(
    numbers: Sequence[int], read: Callable[[range], Int4Weight | Int8Weight | None]
) -> Int4Weight | Int8Weight | None:
    found, order = [read(run) for run in _runs(numbers)], _order(numbers)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in found])[order]

    first = found[0]
    if first is None:
        return None
    if isinstance(first, Int8Weight):
        return Int8Weight(joined("codes"), joined("scales"))
    minimums = None if first.minimums is None else joined("minimums")
    return Int4Weight(joined("codes"), joined("scales"), minimums, first.group, first.inputs)


def _are_contiguous(entries: Sequence[TensorEntry]) -> bool:
    return all(
        (left.file, left.dtype, left.end) == (right.file, right.dtype, right.start) for left, right in pairwise(entries)
    )


def largest_magnitude(values: Tensor) -> float:
    """Return the largest magnitude of the values; NaN if one is NaN, 0 if there are none."""
    if not values.numel():
        return 0.0
    low, high = (float(end) for end in values.aminmax())
    return max(-low, high)  # if a value is NaN, both are NaN


def weight_not_finite(name: str) -> CheckpointInvalid:
    return CheckpointInvalid(
        f"The tensor {name} has a value that is NaN or infinite, so the model cannot compute: the file is damaged, or the "
        "training had diverged. Fetch or export the checkpoint again."
    )


def check_values(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raise `CheckpointInvalid` for a value that is not finite, `PlanImpossible` if it does not fit FP16."""
    largest = largest_magnitude(values)
    if not largest < torch.inf:
        raise weight_not_finite(name)
    if dtype == torch.float16 and largest > _FP16_MAX:
        raise PlanImpossible(
            f"{name} holds {largest:g}, and FP16 ends at {_FP16_MAX:,.0f}: serve this model in bf16 or fp32 (precision=bf16)."
        )


def check_fp8(name: str, codes: Tensor, scales: Tensor) -> None:
    """Raise `CheckpointInvalid` for codes uint8 of E4M3 that are NaN, and for scales that are not finite."""
    if int((codes & _E4M3_NAN).amax()) == _E4M3_NAN or not largest_magnitude(scales) < torch.inf:
        raise weight_not_finite(name)


@contextmanager
def explaining_values_not_finite(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn the failure of a step or a quantization into `CheckpointInvalid` if a weight is not finite."""
    try:
        yield
    except StepFailed:
        name = _tensor_not_finite(checkpoint.tensors)
        raise _numbers_unusable(checkpoint) if name is None else weight_not_finite(name) from None
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        name = _tensor_not_finite(checkpoint.tensors)
        if name is None:
            raise
        raise weight_not_finite(name) from None


def _numbers_unusable(checkpoint: Checkpoint) -> CheckpointInvalid:
    file = checkpoint.gguf or checkpoint.directory / "config.json"
    return CheckpointInvalid(
        f"The model computes values that are not finite, although all its weights are: a number in {file} does not suit it "
        "(such as rope_theta, the epsilon of the norms, or a scale)."
    )


def _tensor_not_finite(tensors: Mapping[str, TensorEntry]) -> str | None:
    with closing(TensorReader(tensors)) as reader:
        for name, entry in tensors.items():
            blocks = (
                (rows for _, rows in reader.row_blocks((entry,))) if len(entry.shape) == 2 else (reader.stored(entry),)
            )
            if any(rows.is_floating_point() and not largest_magnitude(rows) < torch.inf for rows in blocks):
                return name
    return None
