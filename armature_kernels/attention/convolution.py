"""Short convolutions with a state, as in LFM2: each channel is filtered over the last positions of its sequence.

Their inputs are products of two parts of a row, a third part gates the result. The state has the last inputs, as that of the
convolution before a recurrence (recurrence.py), and goes on after draft tokens in the same way.

`csrc/recur.h` has the kernel of a CPU. The function whose name ends in `_torch` is the reference implementation and serves
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armature_kernels.attention.recurrence import StateRun, StateStep
from armature_kernels.linear.activations import ROW_DTYPES
from armature_kernels.native.arguments import OpCode, RecurInputsArguments
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation


def convolve(
    x: Tensor, filters: Tensor, states: Tensor, step: StateStep, kept: Tensor | None = None, gated: bool = True
) -> Tensor:
    """Return b * the filtered a * c, fp32 [tokens, channels], of x = (a, b, c), and change the step's states.

    Args:
        x: The tokens of the step, [tokens, 3 * channels].
        filters: fp32 [width, channels]; the last one is that of a token's own position.
        states: The layer's states of all slots, fp32 [slots, state_elements].
        step: The sequences.
        kept: fp32 [tokens, channels], which gets a * c of runs with drafts; None if the step has none.
        gated: False: x is a * c, fp32 [tokens, channels]; only the states are of use.
    """
    width, channels = filters.shape
    plain = x.dtype in ROW_DTYPES and x.stride(1) == 1 and x.device.type == "cpu"
    if not (plain and has_kernel(OpCode.RECUR_INPUTS)):
        return convolve_torch(x, filters, states, step.runs, kept, gated)
    out = empty((len(x), channels), torch.float32)
    rows = (x.data_ptr(), None, None, step.address, out.data_ptr(), None, states.data_ptr())
    weights = (None if kept is None else kept.data_ptr(), filters.data_ptr(), None, None, None)
    sizes = (x.stride(0), 0, states.stride(0), channels, 0, width, x.dtype == torch.float32, False, gated)
    run_operation(RecurInputsArguments(*rows, *weights, *sizes, 0.0, 0.0, 0.0, 0.0), out.numel())
    return out


def convolve_torch(
    x: Tensor,
    filters: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
    kept: Tensor | None = None,
    gated: bool = True,
) -> Tensor:
    """Compute `convolve` by torch."""
    width, channels = filters.shape
    parts = x.float().chunk(3 if gated else 1, 1)
    inputs = parts[0] * parts[2] if gated else parts[0]
    out = torch.empty_like(inputs)
    for run in runs:
        own, tail = slice(run.first, run.first + run.num_tokens), states[run.slot, : (width - 1) * channels]
        before = tail.view(width - 1, channels) if run.start else tail.new_zeros(width - 1, channels)
        whole = torch.cat((before, inputs[own]))
        out[own] = (whole.unfold(0, width, 1).transpose(1, 2) * filters).sum(1)
        if not run.drafts:
            tail.copy_(whole[run.num_tokens :].flatten())
            if run.saved >= 0:
                states[run.saved] = states[run.slot]
        elif kept is not None:
            kept[own] = inputs[own]
    return out * parts[1] if gated else out
