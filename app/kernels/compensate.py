"""Four bits where the weights still to be rounded make up for the error of each weight that was, as GPTQ has it.

They can where inputs belong together, which a text has shown: the correlation of a product's inputs. Rows may come in any parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.rounding import LEAST, Int4Weight, quantise_int4

DAMPING = 0.05  # of the mean square of an input, added to each: what the text did not show is not relied upon
_BLOCK = 128  # inputs whose errors are handed on together, in one product


def root_of(correlation: Tensor, factors: Tensor | None = None) -> Tensor:
    """Upper triangular U with UᵀU = C⁻¹, FP32 [in, in]; C is the damped sum of x xᵀ over inputs x, or over x / `factors`."""
    damped = correlation if factors is None else correlation / factors / factors[:, None]
    mean = damped.diagonal().mean()
    if not mean > 0:
        return torch.eye(len(damped))
    damped = damped / mean
    damped.diagonal().add_(DAMPING)
    lower: Tensor = torch.linalg.cholesky(damped)
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper


def compensated_int4(weight: Tensor, group: int, zero_points: bool, root: Tensor) -> Int4Weight:
    """weight [out, in] of any float dtype, with the scales of `quantise_int4` and codes that `root` chooses. Finite numbers only."""
    nearest = quantise_int4(weight, group, zero_points)
    scales = nearest.scales.float().T.contiguous()  # [groups, out]: one input's are in one piece, as its weights
    inverses = torch.where(scales.abs() < LEAST, 0.0, 1 / scales)
    begins = scales * -8 if nearest.minimums is None else nearest.minimums.float().T.contiguous()
    left = weight.float().T.contiguous()  # [in, out]: what is still to be rounded, with the errors so far in it
    codes = torch.zeros(nearest.codes.shape[1], len(weight), dtype=torch.uint8)
    codes[len(left) :] = nearest.codes.T[len(left) :]
    for first in range(0, len(left), _BLOCK):
        block = slice(first, min(first + _BLOCK, len(left)))
        errors = torch.empty_like(left[block])
        for j in range(block.start, block.stop):
            scale, inverse, begin = (some[j // group] for some in (scales, inverses, begins))
            picked = ((left[j] - begin) * inverse).round_().clamp_(0, 15)
            codes[j] = picked
            error = torch.div(left[j] - (picked * scale + begin), root[j, j], out=errors[j - first])
            left[j + 1 : block.stop].addr_(root[j, j + 1 : block.stop], error, alpha=-1)
        left[block.stop :].addmm_(root[block, block.stop :].T, errors, alpha=-1)
    return Int4Weight(codes.T.contiguous(), nearest.scales, nearest.minimums, group, nearest.inputs)
