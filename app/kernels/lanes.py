"""The words of lanes between Python and the library: what `armature_run_lanes` takes (csrc/ops.h, csrc/lanes.c)."""

from __future__ import annotations

import ctypes

_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64


class RowPlace(ctypes.Structure):
    """`row_place` in csrc/ops.h."""

    _fields_ = (("word", _ADDRESS), ("which", _INT), ("is_height", _INT))


class TextWords(ctypes.Structure):
    """`text_words` in csrc/ops.h."""

    _fields_ = tuple((name, _ADDRESS) for name in ("token_ids", "positions", "types", "wanted", "texts"))


class TextSteps(ctypes.Structure):
    """`text_steps` in csrc/ops.h."""

    _fields_ = (
        ("words", TextWords),
        ("hidden", _ADDRESS),
        ("operations", _ADDRESS),
        ("count", _INT),
        ("places", _ADDRESS),
        ("num_places", _INT),
    )


class LanesArguments(ctypes.Structure):
    """Not an operation: what `armature_run_lanes` takes (csrc/lanes.c)."""

    _fields_ = (
        ("batch", TextWords),
        *((name, _ADDRESS) for name in ("hidden", "texts", "wanted", "steps")),
        *((name, _INT) for name in ("count", "together", "threads", "size")),
    )
