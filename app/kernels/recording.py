"""A step's operations, recorded once and run again by one native call: without the interpreter between them, as a graph does on a GPU.

While a step is recorded it runs as always; every operation's arguments are kept, and results lie in a pool whose memory stays. What it
starts from lies where it is refreshed in place. What is not an operation of ours (a torch kernel) would be missing when the step is run
again, so it ends the recording: the step stays eager.
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
# What only looks at a tensor, or at it in another way. Some copy where they must, so a result is checked to lie where the tensor does.
_LOOKS = frozenset(
    "__get__ __len__ data_ptr stride size dim numel element_size is_contiguous untyped_storage view view_as reshape flatten unflatten "
    "__getitem__ select split chunk tensor_split unbind narrow unsqueeze squeeze transpose t permute expand detach".split()
)


class Unrecordable(Exception):
    """The step does something that no operation of ours does; its name is the message."""


class Pool:
    """Memory for results: a block is free again when the last tensor that lies in it has gone, and never goes back to the system."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with _not_watched():
            return self._lend(shape, dtype)

    def _lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(
            _CACHE_LINE, 1 << (nbytes - 1).bit_length()
        )  # powers of two: steps of other sizes find room in the same blocks
        block = self._free[size].pop() if self._free[size] else self._new(size)
        lent: np.ndarray[Any, Any] = block.numpy()[:]  # an object of its own, which lives as long as a tensor needs the memory
        weakref.finalize(lent, self._free[size].append, block).atexit = False
        return torch.from_numpy(lent)[:nbytes].view(dtype).view(shape)

    def _new(self, size: int) -> Tensor:
        self.nbytes += size
        return memory.aligned(size)


class Recorded:
    """Operations in order, ready to run again; `result` is read after."""

    def __init__(self, pool: Pool, steps: list[tuple[Code, ctypes.Structure]], result: Any) -> None:
        library = native().library
        assert library is not None, "it recorded operations of the library"
        self._run = library.armature_run
        self._pool, self.steps = pool, steps  # alive: the operations know addresses alone
        self._list = operations.listed(steps)
        self.address, self._count = ctypes.addressof(self._list), len(steps)  # of the list, as the library takes it
        self.result = result

    def __len__(self) -> int:
        return self._count

    def run(self) -> Any:
        """The result lies in memory that the next run overwrites."""
        self._run(self.address, self._count, torch.get_num_threads())
        return self.result


def record(pool: Pool, body: Callable[[], Any]) -> Recorded:
    """Runs `body()` once and keeps what it did; its inputs lie where they will be refreshed. Raises `Unrecordable` in the midst of it."""
    with _recording(pool) as steps, _OnlyOurs():
        result = body()
    return Recorded(pool, steps, result)


def noted(pool: Pool, body: Callable[[], Any]) -> Recorded:
    """As `record`, but nothing is computed: where nobody wants this first result, recording costs no more than the interpreter."""
    steps: list[tuple[Code, ctypes.Structure]] = []
    with memory.allocating(pool.empty), operations.noting(lambda code, arguments: steps.append((code, arguments))), _OnlyOurs():
        result = body()
    return Recorded(pool, steps, result)


@contextmanager
def _recording(pool: Pool) -> Iterator[list[tuple[Code, ctypes.Structure]]]:
    steps: list[tuple[Code, ctypes.Structure]] = []
    with memory.allocating(pool.empty), operations.listening(lambda code, arguments: steps.append((code, arguments))):
        yield steps


_unwatched: list[None] = []  # not empty while the pool itself uses torch


@contextmanager
def _not_watched() -> Iterator[None]:
    _unwatched.append(None)
    try:
        yield
    finally:
        _unwatched.pop()


class _OnlyOurs(TorchFunctionMode):
    """Sees every function of torch that Python calls. (A dispatch mode would see more, but loads a second's worth of modules first.)"""

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
