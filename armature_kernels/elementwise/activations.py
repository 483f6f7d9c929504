"""Elementwise activation between two linear layers, and the top-k outputs of each row of logits.

A native kernel computes the activation on a CPU and a Triton kernel on an NVIDIA GPU; `activate_torch` is the
reference implementation and the fallback. The top logits are kept by the output product while it runs (csrc/pick.h),
so that not all logits are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.linear.activations import ROW_DTYPES, Activations, RowGroups, allocate_output, quantise
from armature_kernels.native.arguments import ACTIVATION_CODES, ActivateArguments, OpCode, TopElementsArguments
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation
from armature_kernels.triton.support import triton_usable

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "tanh"]
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
    "tanh": torch.tanh,
}


def activate(x: Tensor, activation: str, group: RowGroups | None = None) -> Activations:
    """Return act(x) in the dtype of x [tokens, size], quantised if `group` is given.

    `group` is the number of inputs that share one scale. x may be overwritten.
    """
    if x.dtype not in ROW_DTYPES or x.stride(1) != 1 or x.device.type != "cpu" or not has_kernel(OpCode.ACTIVATE):
        result = _activate_elsewhere(x, activation)
        return result if group is None else quantise(result, group)
    rows, size = x.shape
    out, sink = allocate_output(rows, size, group, x.dtype)
    sizes = (x.stride(0), rows, size, ACTIVATION_CODES[activation], x.dtype == torch.float32)
    run_operation(ActivateArguments(x.data_ptr(), *sizes, 0.0, 0.0, sink), OpCode.ACTIVATE, rows * size)
    return out


def xielu(x: Tensor, positive: float, negative: float, group: RowGroups | None = None) -> Activations:
    """Return xIELU(x) (arXiv 2411.13010) in the dtype of x [tokens, size], quantised if `group` is given."""
    if x.dtype not in ROW_DTYPES or x.stride(1) != 1 or x.device.type != "cpu" or not has_kernel(OpCode.ACTIVATE):
        result = xielu_torch(x, positive, negative)
        return result if group is None else quantise(result, group)
    rows, size = x.shape
    out, sink = allocate_output(rows, size, group, x.dtype)
    sizes = (x.stride(0), rows, size, ACTIVATION_CODES["xielu"], x.dtype == torch.float32)
    run_operation(ActivateArguments(x.data_ptr(), *sizes, positive, negative, sink), OpCode.ACTIVATE, rows * size)
    return out


def xielu_torch(x: Tensor, positive: float, negative: float) -> Tensor:
    """Return xIELU(x) computed by torch in at least fp32, in the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    below = wide.clamp_max(0)
    return (torch.where(wide > 0, positive * wide * wide, (below.expm1() - below) * negative) + 0.5 * wide).to(x.dtype)


def convert_rows(hidden: Tensor, dtype: torch.dtype, group: RowGroups | None = None) -> Activations:
    """Return hidden [tokens, size] fp32 as the input of a product: in `dtype`, or quantised if `group` is given.

    The result may be `hidden` itself.
    """
    if group is None and dtype == hidden.dtype:
        return hidden
    native = dtype in ROW_DTYPES and hidden.stride(1) == 1 and hidden.device.type == "cpu"
    if not native or not has_kernel(OpCode.ACTIVATE):
        result = hidden.to(dtype)
        return result if group is None else quantise(result, group)
    rows, size = hidden.shape
    out, sink = allocate_output(rows, size, group, dtype)
    sizes = (hidden.stride(0), rows, size, ACTIVATION_CODES["identity"], True)
    run_operation(ActivateArguments(hidden.data_ptr(), *sizes, 0.0, 0.0, sink), OpCode.ACTIVATE, rows * size)
    return out


def _activate_elsewhere(x: Tensor, activation: str) -> Tensor:
    if triton_usable(x) and x.dim() == 2 and x.stride(1) == 1:
        from armature_kernels.triton import elementwise

        return elementwise.activate(x, activation)
    return activate_torch(x, activation)


def activate_torch(x: Tensor, activation: str) -> Tensor:
    """Return act(x) computed by torch; `activation` is a key of `ACTIVATION_CODES`."""
    return ACTIVATIONS[activation](x)


MAX_TOP_LOGITS = 64  # most outputs per row that a kernel can keep
_TOP_LOGITS_TASKS = 64  # csrc/ops.h


class RowMasks(Protocol):
    """Masks of the outputs that each row may take. Two are equal if they are the same object.

    `words` int32 [rows, ceil(outputs / 32)]: bit o % 32 of word o // 32 is output o. A kernel reads them when it runs.
    """

    @property
    def words(self) -> Tensor:
        """The masks."""
        ...

    def allowed(self, num_rows: int) -> Tensor:
        """Return the masks of the first rows as a tensor of booleans [num_rows, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class TopLogitsRequest:
    """A request for each row's k largest outputs, optionally with the log-sum-exp over all outputs.

    Only outputs that `masks` allow are selected; places without an output have the value -inf.
    """

    k: int
    with_logsumexp: bool = False
    masks: RowMasks | None = None

    def mask_place(self, first_row: int = 0) -> tuple[int | None, int]:
        """Return the address of a row's mask and the words from one row to the next; (None, 0) without masks."""
        if self.masks is None:
            return None, 0
        words = self.masks.words
        return words.data_ptr() + 4 * first_row * words.stride(0), words.stride(0)


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest outputs of each row in descending order, with the lower id first among equals.

    `values` fp32 [rows, k], `ids` int64 [rows, k]. The best value of a row that contains NaN is NaN. `logsumexp`
    fp32 [rows] covers all outputs, and is None if it was not requested.
    """

    values: Tensor
    ids: Tensor
    logsumexp: Tensor | None


@runtime_checkable
class TopLogitsForm(Protocol):
    """A linear form whose product can return only the top outputs of each row."""

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits:
        """Return the top outputs of x times the weight; `softcap` is applied to the logits first."""
        ...


def empty_top_logits(rows: int, request: TopLogitsRequest) -> TopLogits:
    """Allocate the result of a kernel for `rows` rows."""
    return TopLogits(
        empty((rows, request.k), torch.float32),
        empty((rows, request.k), torch.int64),
        empty((rows,), torch.float32) if request.with_logsumexp else None,
    )


def top_logits_scratch(rows: int, request: TopLogitsRequest) -> Tensor:
    """Allocate the scratch memory of a kernel that selects top outputs (csrc/ops.h)."""
    return empty((_TOP_LOGITS_TASKS * rows * (8 * request.k + 16),), torch.uint8)


def top_logits_of(
    logits: Tensor,
    request: TopLogitsRequest,
    softcap: float | None = None,
    out: TopLogits | None = None,
    first_row: int = 0,
) -> TopLogits:
    """Return the top outputs of logits [rows, vocab] fp32, which are first bounded if `softcap` is given.

    At most `MAX_TOP_LOGITS` outputs are supported. The result is written to `out` if that is given. The first row
    has the mask `first_row` of the request.
    """
    rows, outputs = logits.shape
    assert 1 <= request.k <= min(MAX_TOP_LOGITS, outputs), "k must be between 1 and what the kernel keeps"
    best, scratch = out or empty_top_logits(rows, request), top_logits_scratch(rows, request)
    logsumexp = None if best.logsumexp is None else best.logsumexp.data_ptr()
    mask, mask_stride = request.mask_place(first_row)
    addresses = (logits.data_ptr(), best.values.data_ptr(), best.ids.data_ptr(), logsumexp, scratch.data_ptr(), mask)
    run_operation(
        TopElementsArguments(*addresses, logits.stride(0), rows, outputs, request.k, mask_stride, softcap or 0.0),
        OpCode.TOP_ELEMENTS,
        rows * outputs,
    )
    return best


def top_logits_torch(logits: Tensor, request: TopLogitsRequest) -> TopLogits:
    """Return the top outputs of logits [rows, vocab]; this is the reference implementation."""
    logits = logits.float()
    scores = logits if request.masks is None else mask_logits(logits, request.masks)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)  # NaN sorts first and is kept
    return TopLogits(
        values[:, : request.k], ids[:, : request.k], logits.logsumexp(-1) if request.with_logsumexp else None
    )


def mask_logits(logits: Tensor, masks: RowMasks) -> Tensor:
    """Return logits [rows, vocab] with -inf for the tokens that a row may not take."""
    return logits.masked_fill(masks.allowed(len(logits)).logical_not_().to(logits.device), -torch.inf)
