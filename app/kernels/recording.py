"""Recording of a step's native operations, which one native call then replays, like a CUDA graph does on a GPU.

Replay avoids the interpreter between operations. A step that is recorded runs normally. The arguments of every
operation are kept, and results are allocated from a pool whose memory is never freed. Inputs must be at addresses
where the caller refreshes them in place. A torch kernel would be missing from the replay, so it ends the
recording, and the step continues to run eagerly.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.kernels import memory, operations
from app.kernels.native import native
from app.kernels.operations import Code

_CACHE_LINE = 64
# Functions that only inspect a tensor or return a view. Some copy if they must, so a result is checked to share
# the tensor's memory.
_LOOKS = frozenset(
    "__get__ __len__ data_ptr stride size dim numel element_size is_contiguous untyped_storage view view_as reshape flatten unflatten "
    "__getitem__ select split chunk tensor_split unbind narrow unsqueeze squeeze transpose t permute expand detach".split()
)


class Unrecordable(Exception):
    """The step calls something that is not a native operation; the message is its name."""


class Pool:
    """Memory for results, which is never returned to the system.

    A block is reused after the last tensor in it is gone.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor."""
        with _not_watched():
            return self._lend(shape, dtype)

    def _lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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
        return memory.aligned(size)


class Recorded:
    """Recorded operations in order, ready to be replayed; `result` is the output of the recorded step."""

    def __init__(self, pool: Pool, steps: list[tuple[Code, ctypes.Structure]], result: Any) -> None:
        library = native().library
        assert library is not None, "recorded operations require the native library"
        self._run = library.armature_run
        self._pool, self.steps = pool, steps  # kept alive, because the operations contain only addresses
        self._list = operations.listed(steps)
        # Address and length of the array that the library takes.
        self.address, self._count = ctypes.addressof(self._list), len(steps)
        self.result = result

    def __len__(self) -> int:
        return self._count

    def run(self) -> Any:
        """Replay the operations and return the result, whose memory the next run overwrites."""
        self._run(self.address, self._count, torch.get_num_threads())
        return self.result


def record(pool: Pool, body: Callable[[], Any]) -> Recorded:
    """Run `body()` once and record its operations; its inputs must be at addresses that stay valid.

    Raises:
        Unrecordable: If the body calls something that is not a native operation. The body is then incomplete.
    """
    with _recording(pool) as steps, _OnlyOurs():
        result = body()
    return Recorded(pool, steps, result)


def noted(pool: Pool, body: Callable[[], Any]) -> Recorded:
    """Record the operations of `body()` without computing them, for callers that do not need the first result.

    The cost is only the interpreter's time.
    """
    steps: list[tuple[Code, ctypes.Structure]] = []
    with memory.allocating(pool.empty), operations.noting(lambda code, arguments: steps.append((code, arguments))), _OnlyOurs():
        result = body()
    return Recorded(pool, steps, result)


@contextmanager
def _recording(pool: Pool) -> Iterator[list[tuple[Code, ctypes.Structure]]]:
    steps: list[tuple[Code, ctypes.Structure]] = []
    with memory.allocating(pool.empty), operations.listening(lambda code, arguments: steps.append((code, arguments))):
        yield steps


_unwatched: list[None] = []  # not empty while the pool calls torch


@contextmanager
def _not_watched() -> Iterator[None]:
    _unwatched.append(None)
    try:
        yield
    finally:
        _unwatched.pop()


class _OnlyOurs(TorchFunctionMode):
    """Checks every torch function that Python calls.

    A dispatch mode would see more, but its modules take a second to load.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if not _unwatched and name not in _LOOKS:
            raise Unrecordable(name)
        result = func(*args, **(kwargs or {}))
        views = result if isinstance(result, list | tuple) else (result,)
        if not _unwatched and any(isinstance(view, Tensor) and not _same_memory(view, args[0]) for view in views):
            raise Unrecordable(f"a copy ({name})")
        return result


def _same_memory(view: Tensor, tensor: Tensor) -> bool:
    with _not_watched():
        return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
