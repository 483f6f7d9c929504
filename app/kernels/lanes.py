"""ctypes structures of `armature_run_lanes`, which runs an encoder batch on several lanes.

A lane is a set of whole texts that one thread processes through all operations, in separate memory. The structures
mirror csrc/ops.h and csrc/lanes.c.
"""

from __future__ import annotations

import ctypes

_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64


class RowPlace(ctypes.Structure):
    """The structure `row_place` of csrc/ops.h."""

    _fields_ = (("word", _ADDRESS), ("which", _INT), ("is_height", _INT))


class TextWords(ctypes.Structure):
    """The structure `text_words` of csrc/ops.h."""

    _fields_ = tuple((name, _ADDRESS) for name in ("token_ids", "positions", "types", "wanted", "texts"))


class TextSteps(ctypes.Structure):
    """The structure `text_steps` of csrc/ops.h."""

    _fields_ = (
        ("words", TextWords),
        ("hidden", _ADDRESS),
        ("operations", _ADDRESS),
        ("count", _INT),
        ("places", _ADDRESS),
        ("num_places", _INT),
    )


class LanesArguments(ctypes.Structure):
    """The arguments of `armature_run_lanes` (csrc/lanes.c), which is not an operation."""

    _fields_ = (
        ("batch", TextWords),
        *((name, _ADDRESS) for name in ("hidden", "texts", "wanted", "steps")),
        *((name, _INT) for name in ("count", "together", "threads", "size")),
    )
