"""The call that runs native operations, and who is told of it: recordings and dry runs.

Arguments contain addresses of tensors, which the caller keeps alive until the call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from armature_kernels.errors import KernelError
from armature_kernels.native.arguments import (
    ActivateArguments,
    AltUpArguments,
    AttentionArguments,
    ConvolveArguments,
    ConvolvedRowsArguments,
    EmbeddingArguments,
    ExpertsArguments,
    GateArguments,
    GatherArguments,
    Int4GptqArguments,
    Int4ScalesArguments,
    LaneOperations,
    LanesArguments,
    LatentArguments,
    LayerNormArguments,
    LinearBf16Arguments,
    LinearFp32Arguments,
    LinearIntArguments,
    LoraArguments,
    MatchArguments,
    NormArguments,
    OpCode,
    PoolArguments,
    QuantiseArguments,
    RopeAnglesArguments,
    RopeArguments,
    RouteArguments,
    RowCountAddress,
    TextAttentionArguments,
    TopElementsArguments,
    TopLogitsArguments,
)
from armature_kernels.native.library import native_library


class _Operation(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int64), ("arguments", ctypes.c_void_p))


_MIN_POOL_VALUES = 16384  # values: for fewer, waking the other threads costs more than they save

OperationObserver = Callable[[OpCode, ctypes.Structure], None]

_observers: list[
    OperationObserver
] = []  # used by the worker thread, the only one that runs operations during a recording

_dry_run_observers: list[OperationObserver] = []  # observers of a dry run, of which the last one is active


def run_operation(arguments: ctypes.Structure, code: OpCode, values: int | None = None) -> None:
    """Run one operation on this thread's pool, or on this thread alone if it produces few `values`.

    The GIL is released meanwhile. Inside `dry_run_operations`, the operation is reported and not run.
    """
    if _dry_run_observers:
        _dry_run_observers[-1](code, arguments)
        return
    library = native_library().library
    assert library is not None, "callers check that the library is loaded"
    operation = _Operation(int(code), ctypes.addressof(arguments))
    threads = 1 if values is not None and values < _MIN_POOL_VALUES else torch.get_num_threads()
    missing = library.armature_run(ctypes.byref(operation), 1, threads)
    assert missing == 0, f"the level {native_library().level} has no kernel for {code.name}: ask `has` first"
    for listener in _observers:
        listener(code, arguments)


def operation_array(steps: Sequence[tuple[OpCode, ctypes.Structure]]) -> ctypes.Array[Any]:
    """Return operations as the array that `armature_run` takes; the caller must keep the arguments alive."""
    return (_Operation * len(steps))(*(_Operation(int(code), ctypes.addressof(arguments)) for code, arguments in steps))


@contextmanager
def observe_operations(listener: OperationObserver) -> Iterator[None]:
    """Call the listener after every operation that runs within the context."""
    _observers.append(listener)
    try:
        yield
    finally:
        _observers.remove(listener)


@contextmanager
def dry_run_operations(listener: OperationObserver) -> Iterator[None]:
    """Call the listener for every operation within the context instead of running it.

    Results are not initialised.
    """
    _dry_run_observers.append(listener)
    try:
        yield
    finally:
        _dry_run_observers.pop()


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
    structures = (
        QuantiseArguments,
        NormArguments,
        GateArguments,
        RopeArguments,
        LinearIntArguments,
        TopLogitsArguments,
        AttentionArguments,
        EmbeddingArguments,
        GatherArguments,
        LinearBf16Arguments,
        RopeAnglesArguments,
        LayerNormArguments,
        ActivateArguments,
        TextAttentionArguments,
        Int4ScalesArguments,
        Int4GptqArguments,
        LinearFp32Arguments,
        TopElementsArguments,
        PoolArguments,
        LoraArguments,
        RouteArguments,
        ExpertsArguments,
        LatentArguments,
        ConvolveArguments,
        ConvolvedRowsArguments,
        AltUpArguments,
        MatchArguments,
    )
    expected = {arguments.__name__: (int(arguments.code), ctypes.sizeof(arguments)) for arguments in structures}
    expected["Lanes"] = (len(OpCode), sum(map(ctypes.sizeof, (LanesArguments, LaneOperations, RowCountAddress))))
    for name, (code, here) in expected.items():
        size = int(library.armature_size(code)) if hasattr(library, "armature_size") else 0
        if size != here:
            raise KernelError(
                f"The native library is of another version ({name} has {size} bytes there, {here} here). "
                "In a checkout, make native builds it again; else install the package again."
            )
    return True
