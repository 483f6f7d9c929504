"""The call that runs native operations, and who is told of it: recordings and dry runs.

Arguments contain addresses of tensors, which the caller keeps alive until the call returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from armature_kernels.errors import KernelError
from armature_kernels.native.arguments import Arguments, LaneOperations, LanesArguments, OpCode, RowCountAddress
from armature_kernels.native.library import native_library


class _Operation(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int64), ("arguments", ctypes.c_void_p))


_MIN_POOL_VALUES = 16384  # values: for fewer, waking the other threads costs more than they save

OperationObserver = Callable[[OpCode, ctypes.Structure], None]


class _Observers(threading.local):
    """Who is told of the operations of a thread: other threads may run operations during a recording.

    Of the observers of a dry run the last one is active.
    """

    def __init__(self) -> None:
        self.runs: list[OperationObserver] = []
        self.dry_runs: list[OperationObserver] = []


_observers = _Observers()


def run_operation(arguments: Arguments, values: int | None = None) -> None:
    """Run one operation on this thread's pool, or on this thread alone if it produces few `values`.

    The GIL is released meanwhile. Inside `dry_run_operations`, the operation is reported and not run.
    """
    code = arguments.code
    if _observers.dry_runs:
        _observers.dry_runs[-1](code, arguments)
        return
    library = native_library().library
    assert library is not None, "callers check that the library is loaded"
    operation = _Operation(int(code), ctypes.addressof(arguments))
    threads = 1 if values is not None and values < _MIN_POOL_VALUES else torch.get_num_threads()
    missing = library.armature_run(ctypes.byref(operation), 1, threads)
    assert missing == 0, f"the level {native_library().level} has no kernel for {code.name}: ask `has` first"
    for listener in _observers.runs:
        listener(code, arguments)


def operation_array(steps: Sequence[tuple[OpCode, ctypes.Structure]]) -> ctypes.Array[Any]:
    """Return operations as the array that `armature_run` takes; the caller must keep the arguments alive."""
    return (_Operation * len(steps))(*(_Operation(int(code), ctypes.addressof(arguments)) for code, arguments in steps))


@contextmanager
def observe_operations(listener: OperationObserver) -> Iterator[None]:
    """Call the listener after every operation that runs within the context."""
    _observers.runs.append(listener)
    try:
        yield
    finally:
        _observers.runs.remove(listener)


@contextmanager
def dry_run_operations(listener: OperationObserver) -> Iterator[None]:
    """Call the listener for every operation within the context instead of running it.

    Results are not initialised.
    """
    _observers.dry_runs.append(listener)
    try:
        yield
    finally:
        _observers.dry_runs.pop()


def has_kernel(code: OpCode) -> bool:
    """Return True if the library is loaded and its level has a kernel for this operation.

    Raises:
        KernelError: If the library has another version than this file, because it would read the arguments
            differently.
    """
    library = native_library().library
    return library is not None and _version_matches() and bool(library.armature_has(int(code)))


@cache
def _version_matches() -> bool:
    library = native_library().library
    assert library is not None, "callers check that the library is loaded"
    expected = {
        arguments.__name__: (int(arguments.code), ctypes.sizeof(arguments)) for arguments in Arguments.__subclasses__()
    }
    expected["Lanes"] = (len(OpCode), sum(map(ctypes.sizeof, (LanesArguments, LaneOperations, RowCountAddress))))
    for name, (code, here) in expected.items():
        size = int(library.armature_size(code)) if hasattr(library, "armature_size") else 0
        if size != here:
            raise KernelError(
                f"The native library is of another version ({name} has {size} bytes there, {here} here). "
                "In a checkout, make native builds it again; else install the package again."
            )
    return True
