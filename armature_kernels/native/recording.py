"""Recording of a step's native operations, which one native call then replays, like a CUDA graph does on a GPU.

Replay avoids the interpreter between operations. A step that is recorded runs normally: the arguments of every
operation are kept, and results are allocated from a pool whose memory is never freed. Inputs must be at addresses
where the caller refreshes them in place. A torch kernel would be missing from the replay, so it ends the recording,
and the step continues to run eagerly.

`RecordedRowCounts` changes the number of rows of recorded operations, up to the number they were recorded with. Every
row is computed like every other, so only the count changes, and results occupy the beginning of the memory. A step
that reads texts has two row counts: its tokens, and the tokens that the last layer still needs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from armature_kernels.native import memory, operations
from armature_kernels.native.arguments import OpCode, RowCountAddress, RowSink
from armature_kernels.native.library import native_library

_CACHE_LINE = 64
# Functions that only inspect a tensor or return a view. Some copy if they must, so a result is checked to share
# the tensor's memory.
_VIEW_FUNCTIONS = frozenset(
    "__get__ __len__ data_ptr stride size dim numel element_size is_contiguous untyped_storage view view_as reshape flatten unflatten "
    "__getitem__ select split chunk tensor_split unbind narrow unsqueeze squeeze transpose t permute expand detach".split()
)


class NotRecordable(Exception):
    """The step calls something that is not a native operation; the message is its name."""


class ResultPool:
    """Memory for results, which is never returned to the system.

    A block is reused after the last tensor in it is gone.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor."""
        with _without_checks():
            return self._allocate(shape, dtype)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        # Powers of two, so that steps of other sizes can reuse the same blocks.
        size = max(_CACHE_LINE, 1 << (nbytes - 1).bit_length())
        block = self._free[size].pop() if self._free[size] else self._new(size)
        # A separate object, which lives as long as a tensor needs the memory.
        lent: np.ndarray[Any, Any] = block.numpy()[:]
        weakref.finalize(lent, self._free[size].append, block).atexit = False
        return torch.from_numpy(lent)[:nbytes].view(dtype).view(shape)

    def _new(self, size: int) -> Tensor:
        self.nbytes += size
        return memory.aligned_bytes(size)


class RecordedOperations:
    """Recorded operations in order, ready to be replayed; `result` is the output of the recorded step."""

    def __init__(self, pool: ResultPool, steps: list[tuple[OpCode, ctypes.Structure]], result: Any) -> None:
        library = native_library().library
        assert library is not None, "recorded operations require the native library"
        self._run = library.armature_run
        self._pool, self.operations = pool, steps  # kept alive, because the operations contain only addresses
        self._array = operations.operation_array(steps)
        # Address and length of the array that the library takes.
        self.address, self._count = ctypes.addressof(self._array), len(steps)
        self.result = result

    def __len__(self) -> int:
        return self._count

    def run(self) -> Any:
        """Replay the operations and return the result, whose memory the next run overwrites."""
        self._run(self.address, self._count, torch.get_num_threads())
        return self.result


def record_operations(pool: ResultPool, body: Callable[[], Any]) -> RecordedOperations:
    """Run `body()` once and record its operations; its inputs must be at addresses that stay valid.

    Raises:
        Unrecordable: If the body calls something that is not a native operation. The body is then incomplete.
    """
    with _recording(pool) as steps, _NativeOnly():
        result = body()
    return RecordedOperations(pool, steps, result)


def record_dry_run(pool: ResultPool, body: Callable[[], Any]) -> RecordedOperations:
    """Record the operations of `body()` without computing them, for callers that do not need the first result.

    The cost is only the interpreter's time.
    """
    steps: list[tuple[OpCode, ctypes.Structure]] = []
    with (
        memory.use_allocator(pool.empty),
        operations.dry_run_operations(lambda code, arguments: steps.append((code, arguments))),
        _NativeOnly(),
    ):
        result = body()
    return RecordedOperations(pool, steps, result)


@contextmanager
def _recording(pool: ResultPool) -> Iterator[list[tuple[OpCode, ctypes.Structure]]]:
    steps: list[tuple[OpCode, ctypes.Structure]] = []
    with (
        memory.use_allocator(pool.empty),
        operations.observe_operations(lambda code, arguments: steps.append((code, arguments))),
    ):
        yield steps


_unchecked: list[None] = []  # not empty while the pool calls torch


@contextmanager
def _without_checks() -> Iterator[None]:
    _unchecked.append(None)
    try:
        yield
    finally:
        _unchecked.pop()


class _NativeOnly(TorchFunctionMode):
    """Checks every torch function that Python calls.

    A dispatch mode would see more, but its modules take a second to load.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if not _unchecked and name not in _VIEW_FUNCTIONS:
            raise NotRecordable(name)
        result = func(*args, **(kwargs or {}))
        views = result if isinstance(result, list | tuple) else (result,)
        if not _unchecked and any(isinstance(view, Tensor) and not _same_memory(view, args[0]) for view in views):
            raise NotRecordable(f"a copy ({name})")
        return result


def _same_memory(view: Tensor, tensor: Tensor) -> bool:
    with _without_checks():
        return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


_FIELD_BYTES = ctypes.sizeof(ctypes.c_int64)
_COUNT_FIELDS = ("rows", "count")  # names of the row count in the operations' arguments (csrc/ops.h)


class RecordedRowCounts:
    """Sets the row counts of recorded operations.

    The owner of the recording keeps the arguments alive. `addresses` locates the counts for the library
    (csrc/lanes.c).
    """

    def __init__(self, steps: Sequence[tuple[OpCode, ctypes.Structure]], sizes: Sequence[int]) -> None:
        """Find the row counts in the arguments of `steps`.

        Args:
            steps: The recorded operations.
            sizes: The row counts they were recorded with, all different.

        Raises:
            Unrecordable: If an operation has another row count.
        """
        assert len(set(sizes)) == len(sizes), "row counts must be different to be distinguishable"
        addresses = [place for code, arguments in steps for place in _row_count_addresses(code, arguments, sizes)]
        self.addresses = (RowCountAddress * len(addresses))(*addresses)
        self.sizes = tuple(sizes)

    def set(self, sizes: tuple[int, ...]) -> None:
        """Set the row counts; each at least one, and at most the one that was recorded."""
        assert len(sizes) == len(self.sizes) and all(
            0 < now <= most for now, most in zip(sizes, self.sizes, strict=True)
        )
        library = native_library().library
        assert library is not None, "recorded operations require the native library"
        now = (ctypes.c_int64 * len(sizes))(*sizes)
        library.armature_resize(ctypes.byref(self.addresses), len(self.addresses), ctypes.byref(now))


def _row_count_addresses(code: OpCode, arguments: ctypes.Structure, sizes: Sequence[int]) -> Iterator[RowCountAddress]:
    names = {field[0]: field[1] for field in arguments._fields_}
    count = next((name for name in _COUNT_FIELDS if name in names), None)
    if count is None:
        return  # it reads its row count from a buffer that is refilled for every step
    if getattr(arguments, count) not in sizes:
        raise NotRecordable(f"{code.name} of {getattr(arguments, count)} rows")
    which = sizes.index(getattr(arguments, count))
    yield RowCountAddress(_address(arguments, count), which, False)
    for holder in _sinks(arguments, names):
        if getattr(holder, "height", 0):
            yield RowCountAddress(_address(holder, "height"), which, True)


def _sinks(arguments: ctypes.Structure, names: dict[str, type]) -> Iterable[ctypes.Structure]:
    """Return the arguments and the `RowSink` structures in them."""
    return [arguments, *(getattr(arguments, name) for name, kind in names.items() if kind is RowSink)]


def _address(holder: ctypes.Structure, name: str) -> int:
    field = getattr(type(holder), name)
    assert field.size == _FIELD_BYTES, "every integer field must have eight bytes"
    return ctypes.addressof(holder) + int(field.offset)
