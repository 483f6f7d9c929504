"""Math functions of fp32 blocks that Triton lacks, or that must treat NaN like torch does; called by kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh with a relative error below 1e-6 everywhere.

    Below 0.1 it uses odd powers, because the quotient of exponentials would lose digits there.
    """
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def activated(x, activation: tl.constexpr):
    """Apply an activation of `ACTIVATIONS` like torch does; NaN stays NaN."""
    if activation == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif activation == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # (1 + tanh u) / 2 is the logistic function of 2u.
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == "relu":
        result = tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(activation == "tanh", "no such activation")
        result = tanh(x)
    return result
