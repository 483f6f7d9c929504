"""The operations of the native library: the codes and arguments of `csrc/ops.h`, and the call that runs them.

Arguments contain addresses of tensors, which the caller keeps alive until the call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from app.errors import PlanImpossible
from app.kernels.lanes import LanesArguments, RowPlace, TextSteps
from app.kernels.native import native

_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Code(IntEnum):
    """Operation codes, equal to the `enum` in csrc/ops.h."""

    QUANTISE = 0
    NORM = 1
    GATE = 2
    TURN = 3
    LINEAR_INT = 4
    PICK = 5
    ATTENTION = 6
    ROWS = 7
    GATHER = 8
    LINEAR_BF16 = 9
    ANGLES = 10
    LAYER_NORM = 11
    ACTIVATE = 12
    TEXTS = 13


class Output(IntEnum):
    """The destination format of a product's sums."""

    BF16 = 0
    FP32 = 1
    ADD_FP32 = 2


class Sink(ctypes.Structure):
    """The output of a kernel that writes rows: bf16 rows, or quantised tiles with scales and sums."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("rows", "tiles", "scales", "sums")),
        *((name, _INT) for name in ("group", "height")),
    )


class Quantise(ctypes.Structure):
    """Arguments of the quantisation of bf16 rows to int8 tiles."""

    code = Code.QUANTISE
    _fields_ = (("x", _ADDRESS), *((name, _INT) for name in ("stride", "rows", "size")), ("out", Sink))


class Norm(ctypes.Structure):
    """Arguments of RMSNorm, or of adding the RMSNorm of `branch` to `hidden`."""

    code = Code.NORM
    _fields_ = (
        *((name, _ADDRESS) for name in ("hidden", "branch", "weight")),
        *((name, _INT) for name in ("stride", "rows", "size")),
        ("eps", _FLOAT),
        ("out", Sink),
    )


class LayerNorm(ctypes.Structure):
    """Arguments of LayerNorm."""

    code = Code.LAYER_NORM
    _fields_ = (
        *((name, _ADDRESS) for name in ("hidden", "weight", "bias")),
        *((name, _INT) for name in ("stride", "rows", "size", "in_place")),
        ("eps", _FLOAT),
        ("out", Sink),
    )


# Activation codes, equal to the `enum` in csrc/ops.h; 0 is the identity.
ACTIVATIONS = {name: at for at, name in enumerate(("identity", "silu", "gelu_tanh", "gelu", "relu", "tanh"))}


class Activate(ctypes.Structure):
    """Arguments of an elementwise activation."""

    code = Code.ACTIVATE
    _fields_ = (("x", _ADDRESS), *((name, _INT) for name in ("stride", "rows", "size", "activation")), ("out", Sink))


class Gate(ctypes.Structure):
    """Arguments of a gated activation, act(gate) * up."""

    code = Code.GATE
    _fields_ = (("gate_up", _ADDRESS), *((name, _INT) for name in ("rows", "size", "activation")), ("out", Sink))


class LinearInt(ctypes.Structure):
    """Arguments of the integer product with a weight in int4 or int8 panels."""

    code = Code.LINEAR_INT
    _fields_ = (
        *((name, _ADDRESS) for name in ("panels", "bias", "tiles", "scales", "sums", "y")),
        *(
            (name, _INT)
            for name in ("y_stride", "rows", "padded", "outputs", "group", "height", "bits", "minimums", "output", "activation")
        ),
    )


class Pick(ctypes.Structure):
    """Arguments of the integer product that returns only the top outputs of each row."""

    code = Code.PICK
    _fields_ = (
        ("product", LinearInt),
        *((name, _ADDRESS) for name in ("values", "ids", "logsumexp", "scratch")),
        ("k", _INT),
        ("softcap", _FLOAT),
    )


class Rows(ctypes.Structure):
    """Arguments of reading rows of a table or packed weight as fp32."""

    code = Code.ROWS
    _fields_ = (
        *((name, _ADDRESS) for name in ("weight", "ids", "factors", "out")),
        *((name, _INT) for name in ("count", "outputs", "inputs", "padded", "group", "form", "minimums", "add")),
        ("factor", _FLOAT),
    )


class Gather(ctypes.Structure):
    """Arguments of copying rows by index."""

    code = Code.GATHER
    _fields_ = (*((name, _ADDRESS) for name in ("x", "ids", "out")), *((name, _INT) for name in ("stride", "count", "size")))


class LinearBf16(ctypes.Structure):
    """Arguments of the product with a weight in bf16 panels."""

    code = Code.LINEAR_BF16
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "panels", "bias", "tiles", "y")),
        *((name, _INT) for name in ("x_stride", "y_stride", "rows", "inputs", "outputs", "output", "fixed", "activation")),
    )


class Angle(ctypes.Structure):
    """Arguments of the computation of RoPE angles."""

    code = Code.ANGLES
    _fields_ = (
        *((name, _ADDRESS) for name in ("positions", "frequencies", "cos", "sin")),
        *((name, _INT) for name in ("count", "half")),
        ("scale", _FLOAT),
    )


class KVAddresses(ctypes.Structure):
    """The structure `kv_rows` of csrc/ops.h."""

    _fields_ = (*((name, _ADDRESS) for name in ("keys", "values", "key_scales", "value_scales")), ("token_bytes", _INT))


class Attention(ctypes.Structure):
    """Arguments of causal attention over a KV cache."""

    code = Code.ATTENTION
    _fields_ = (
        *((name, _ADDRESS) for name in ("query", "out", "step")),
        ("kv", KVAddresses),
        *((name, _INT) for name in ("query_stride", "out_stride", "heads", "kv_heads", "head_dim", "window")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


class TextsAttention(ctypes.Structure):
    """Arguments of attention within packed texts, without a KV cache."""

    code = Code.TEXTS
    _fields_ = (
        *((name, _ADDRESS) for name in ("query", "key", "value", "out", "texts", "bias")),
        *((name, _INT) for name in ("stride", "out_stride", "heads", "kv_heads", "head_dim", "before", "after", "most", "wide")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


class Turn(ctypes.Structure):
    """Arguments of per-head norms, RoPE and the KV cache write."""

    code = Code.TURN
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "query_norm", "key_norm", "cos", "sin", "written")),
        ("kv", KVAddresses),
        *((name, _INT) for name in ("stride", "rows", "heads", "kv_heads", "head_dim", "dim")),
        ("eps", _FLOAT),
    )


class Pack(ctypes.Structure):
    """The arguments of `armature_pack_int` (csrc/pack_int.c), which is not an operation."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("codes", "scales", "minimums", "panels")),
        *((name, _INT) for name in ("outputs", "first", "padded", "group", "bits")),
    )


class _Operation(ctypes.Structure):
    _fields_ = (("code", _INT), ("arguments", _ADDRESS))


_WORTH_A_POOL = 16384  # values: for fewer, waking the other threads costs more than they save
Listener = Callable[[Code, ctypes.Structure], None]
_listeners: list[Listener] = []  # used by the worker thread, the only one that runs operations during a recording
_notes: list[Listener] = []  # observers of a dry run, of which the last one is active


def run(arguments: ctypes.Structure, code: Code, values: int | None = None) -> None:
    """Run one operation on this thread's pool, or on this thread alone if it produces few `values`.

    The GIL is released meanwhile. Inside `dry_run_operations`, the operation is reported and not run.
    """
    if _notes:
        _notes[-1](code, arguments)
        return
    library = native().library
    assert library is not None, "callers check that the library is loaded"
    operation = _Operation(int(code), ctypes.addressof(arguments))
    threads = 1 if values is not None and values < _WORTH_A_POOL else torch.get_num_threads()
    missing = library.armature_run(ctypes.byref(operation), 1, threads)
    assert missing == 0, f"the level {native().level} has no kernel for {code.name}: ask `has` first"
    for listener in _listeners:
        listener(code, arguments)


def listed(steps: Sequence[tuple[Code, ctypes.Structure]]) -> ctypes.Array[Any]:
    """Return operations as the array that `armature_run` takes; the caller must keep the arguments alive."""
    return (_Operation * len(steps))(*(_Operation(int(code), ctypes.addressof(arguments)) for code, arguments in steps))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call the listener after every operation that runs within the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def noting(listener: Listener) -> Iterator[None]:
    """Call the listener for every operation within the context instead of running it.

    Results are not initialised.
    """
    _notes.append(listener)
    try:
        yield
    finally:
        _notes.pop()


def has(code: Code) -> bool:
    """Return True if the library is loaded and its level has a kernel for this operation.

    Raises:
        PlanImpossible: If the library has another version than this file, because it would read the arguments
            differently.
    """
    library = native().library
    return library is not None and _of_this_version() and bool(library.armature_has(int(code)))


@cache
def _of_this_version() -> bool:
    library = native().library
    assert library is not None, "callers check that the library is loaded"
    own = (
        Quantise,
        Norm,
        Gate,
        Turn,
        LinearInt,
        Pick,
        Attention,
        Rows,
        Gather,
        LinearBf16,
        Angle,
        LayerNorm,
        Activate,
        TextsAttention,
    )
    expected = {arguments.__name__: (int(arguments.code), ctypes.sizeof(arguments)) for arguments in own}
    expected["Lanes"] = (len(Code), sum(map(ctypes.sizeof, (LanesArguments, TextSteps, RowPlace))))
    for name, (code, here) in expected.items():
        size = int(library.armature_size(code)) if hasattr(library, "armature_size") else 0
        if size != here:
            raise PlanImpossible(
                f"The native library is of another version ({name} has {size} bytes there, {here} here). "
                "In a checkout, make native builds it again; else install the package again."
            )
    return True
