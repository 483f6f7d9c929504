"""LoRA adapters in products: y += B (A x) for the rows of a step that have an adapter.

Rows of several adapters share a step: `LoraRows` lists the rows of each adapter, and each adapter's weights are read
once for every few rows (csrc/lora.h). A product keeps a table of the weights of each slot at a fixed address, so that
recorded steps serve adapters that are loaded later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from armature_kernels.linear.activations import Activations, QuantizedActivations, rows_of, unpack_tiles, unquantized
from armature_kernels.linear.layout import LORA_INPUT_STEP, LORA_RANK_STEP, MAX_LORA_RANK, PANEL_OUTPUTS
from armature_kernels.native.arguments import MAX_LORA_PARTS, LoraArguments, OpCode
from armature_kernels.native.memory import Int64Buffer, aligned_bytes, empty
from armature_kernels.native.operations import has_kernel, run_operation

BLOCK_ROWS = 4  # rows that share one reading of an adapter's weights (csrc/ops.h)
_BLOCK_WORDS = 2 + BLOCK_ROWS

RowRun = tuple[int | None, int, int]  # slot of the adapter (None: none), first row, number of rows


class LoraRows:
    """The rows of the present step that have an adapter, at fixed addresses.

    A step has two numbers of rows: its tokens, and the rows that the last layer still needs.
    """

    def __init__(self, max_tokens: int) -> None:
        capacity = 1 + _BLOCK_WORDS * max_tokens
        self._tokens, self._wanted = Int64Buffer(capacity), Int64Buffer(capacity)
        self._num_tokens = 0
        self._tokens.fill([0])
        self._wanted.fill([0])

    def fill(self, tokens: Sequence[RowRun], wanted: Sequence[RowRun], num_tokens: int) -> None:
        """Set the rows of the next step: all of its tokens, and those whose logits are needed, in their own numbers."""
        self._num_tokens = num_tokens
        self._tokens.fill(_blocks(tokens))
        self._wanted.fill(_blocks(wanted))

    def buffer(self, num_rows: int) -> Int64Buffer:
        """Return the blocks of a product of this many rows.

        If a step needs all its tokens to the end, both lists are the same.
        """
        return self._tokens if num_rows == self._num_tokens else self._wanted


def _blocks(runs: Iterable[RowRun]) -> list[int]:
    """Return the number of blocks, then each one's slot, number of rows and rows (`lora_step` in csrc/ops.h)."""
    by_slot: dict[int, list[int]] = {}
    for slot, first, count in runs:
        if slot is not None:
            by_slot.setdefault(slot, []).extend(range(first, first + count))
    values = [0]
    for slot, rows in by_slot.items():
        for start in range(0, len(rows), BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            values += [slot, len(block), *block, *([0] * (BLOCK_ROWS - len(block)))]
            values[0] += 1
    return values


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """The number of adapters that may be loaded at the same time, their highest rank, and the dtype of their weights."""

    count: int
    max_rank: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The packed weights of an adapter for one layer: A [rank, inputs] and B [outputs, rank], which has the scale."""

    rank: int
    inputs: int
    outputs: int
    a: Tensor
    b: Tensor

    @classmethod
    def pack(cls, a: Tensor, b: Tensor, dtype: torch.dtype) -> LoraWeights:
        """Pack A [rank, inputs] and B [outputs, rank] of any float dtype to `dtype`, bf16 or fp32."""
        rank, inputs = a.shape
        outputs = b.shape[0]
        ranks, columns = (-(-n // step) * step for n, step in ((rank, LORA_RANK_STEP), (inputs, LORA_INPUT_STEP)))
        panels = -(-outputs // PANEL_OUTPUTS)
        narrow_a, narrow_b = _zeros((ranks, columns), dtype), _zeros((panels * PANEL_OUTPUTS, rank), dtype)
        narrow_a[:rank, :inputs], narrow_b[:outputs] = a, b
        packed_a = narrow_a.view(
            ranks // LORA_RANK_STEP, LORA_RANK_STEP, columns // LORA_INPUT_STEP, LORA_INPUT_STEP
        ).transpose(1, 2)
        packed_b = narrow_b.view(panels, PANEL_OUTPUTS, rank).transpose(1, 2)
        return cls(rank, inputs, outputs, _aligned(packed_a), _aligned(packed_b))

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.a.nbytes + self.b.nbytes

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, inputs] and B [outputs, rank] as they were packed, in FP32."""
        a = self.a.transpose(1, 2).reshape(-1, self.a.shape[1] * LORA_INPUT_STEP)[: self.rank, : self.inputs]
        return a.float(), self.b.transpose(1, 2).reshape(-1, self.rank)[: self.outputs].float()


def _zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _aligned(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that begins at a cache line."""
    copy = aligned_bytes(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class LoraProduct:
    """The adapters of one product [inputs to outputs], whose outputs are those of its sources one after the other.

    `table` has three words for each slot and source: the addresses of A and B, and the rank; all 0 without weights.
    """

    def __init__(self, rows: LoraRows, inputs: int, source_rows: Sequence[int], slots: LoraSlots) -> None:
        assert len(source_rows) <= MAX_LORA_PARTS and slots.max_rank <= MAX_LORA_RANK, "the kernel's limits"
        self._rows, self._inputs, self._outputs, self._slots = rows, inputs, tuple(source_rows), slots
        self._max_rank = -(-slots.max_rank // LORA_RANK_STEP) * LORA_RANK_STEP
        self._table = (ctypes.c_int64 * (3 * slots.count * len(source_rows)))()
        self._weights: dict[tuple[int, int], LoraWeights] = {}

    def set_weights(self, slot: int, source: int, weights: LoraWeights | None) -> None:
        """Set, or remove, an adapter's weights for one source. No step may run meanwhile."""
        assert 0 <= slot < self._slots.count and 0 <= source < len(self._outputs), "a place of the table"
        first = 3 * (slot * len(self._outputs) + source)
        if weights is None:
            self._table[first : first + 3] = [0, 0, 0]
            self._weights.pop((slot, source), None)
            return
        assert (weights.inputs, weights.outputs) == (self._inputs, self._outputs[source]), "shapes were checked before"
        assert weights.rank <= self._slots.max_rank, "the rank was checked before"
        assert weights.a.dtype == self._slots.dtype, "all adapters of a server have one dtype"
        self._table[first : first + 3] = [weights.a.data_ptr(), weights.b.data_ptr(), weights.rank]
        self._weights[slot, source] = weights

    def add(self, y: Tensor, x: Activations) -> None:
        """Add the products of the step's adapters with x [rows, inputs] to y [rows, outputs], bf16 or FP32, in place.

        Rows without an adapter are not changed.
        """
        if not has_kernel(OpCode.LORA):
            self.add_torch(y, x)
            return
        num_rows, num_parts = rows_of(x), len(self._outputs)
        shrunk = empty((num_rows, num_parts, self._max_rank), torch.float32)
        words = MAX_LORA_PARTS * ctypes.c_int64
        firsts = [sum(self._outputs[:part]) for part in range(num_parts)]
        place = partial(
            LoraArguments,
            y=y.data_ptr(), parts=ctypes.addressof(self._table), step=self._rows.buffer(num_rows).address,
            shrunk=shrunk.data_ptr(), y_stride=y.stride(0), rows=num_rows, inputs=self._inputs, num_parts=num_parts,
            max_rank=self._max_rank, wide_y=y.dtype == torch.float32, wide_weights=self._slots.dtype == torch.float32,
            first_outputs=words(*firsts), outputs=words(*self._outputs),
        )  # fmt: skip
        if isinstance(x, QuantizedActivations):
            arguments = place(
                tiles=x.codes.data_ptr(), scales=x.scales.data_ptr(), padded=x.padded, group=x.group, height=x.height
            )
        else:
            plain = unquantized(x)
            plain = plain if plain.stride(-1) == 1 else plain.contiguous()
            arguments = place(x=plain.data_ptr(), x_stride=plain.stride(0), wide_x=plain.dtype == torch.float32)
        run_operation(arguments)

    def add_torch(self, y: Tensor, x: Activations) -> None:
        """Add the products by torch in FP32, row by row. This is the reference implementation of `add`."""
        buffer = self._rows.buffer(rows_of(x)).tensor
        values = buffer[: 1 + _BLOCK_WORDS * int(buffer[0])].tolist()
        rows_of_slot: dict[int, list[int]] = {}
        for block in range(values[0]):
            slot, count, *rows = values[1 + block * _BLOCK_WORDS : 1 + (block + 1) * _BLOCK_WORDS]
            rows_of_slot.setdefault(slot, []).extend(rows[:count])
        wide = _dequantized(x) if isinstance(x, QuantizedActivations) else unquantized(x)
        for slot, rows in rows_of_slot.items():
            first = 0
            for source, count in enumerate(self._outputs):
                weights = self._weights.get((slot, source))
                if weights is not None:
                    a, b = weights.unpacked()
                    y[rows, first : first + count] += (wide[rows].float() @ a.T @ b.T).to(y.dtype)
                first += count


def _dequantized(x: QuantizedActivations) -> Tensor:
    codes, scales = unpack_tiles(x)
    return (codes.float() * scales[..., None]).flatten(1)[:, : x.size]
