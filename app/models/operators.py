"""The operators that a program's nodes may call: torch's own aten operators and arithmetic on sizes, by name.

torch's loader resolves any name below `torch.`. Here a name must be in a table or be an aten operator that
accesses no file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from app.errors import CheckpointInvalid
from app.models.graph import Word

ATEN = "torch.ops.aten."
# They read or write files or arbitrary memory.
_REFUSED = frozenset({"from_file", "data_ptr", "set_", "resize_", "resize_as_", "_resize_output_"})
# Assertions of the exporter. They are skipped: types may differ here, where products are BF16, and the signature
# checks sizes.
SILENT = frozenset(
    f"{ATEN}{name}"
    for name in (
        "_assert_tensor_metadata.default",
        "_assert_scalar.default",
        "_assert_async.msg",
        "sym_constrain_range_for_size.default",
    )
)
SET_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"

_ARITHMETIC = "add sub mul truediv floordiv mod neg eq ne lt le gt ge and_ or_ getitem"
_SIZES: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _ARITHMETIC.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    "torch.sym_sum": sum,
    "torch._sym_sqrt": math.sqrt,
}


def operator_named(target: str) -> Callable[..., Any]:
    """Return the operator of that name. Raises `CheckpointInvalid` if it is not allowed or does not exist."""
    if target in _SIZES:
        return _SIZES[target]
    name, _, overload = target.removeprefix(ATEN).partition(".")
    if not target.startswith(ATEN) or not overload.isidentifier() or name in _REFUSED or not name.isidentifier():
        raise CheckpointInvalid(
            f"The program calls {target[:120]!r}, which is not one of torch's own operators and is not allowed."
        )
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CheckpointInvalid(f"The program calls {target[:120]!r}, which torch {torch.__version__} does not have.")
    return found


def constant(word: Word) -> Any:
    """Return the torch object of a constant."""
    return torch.device("cpu") if word.kind == "device" else getattr(torch, word.name)
