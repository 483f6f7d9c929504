"""Four bits where the weights still to be rounded make up for the error of each weight that was, as GPTQ has it.

They can where inputs belong together, which a text has shown: the correlation of a product's inputs. Rows may come in any parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.rounding import LEAST, Int4Weight, quantise_int4

DAMPING = 0.1  # of the mean square of an input, added to each: what the text did not show is not relied upon
_BLOCK = 128  # inputs whose errors are handed on together, in one product


@dataclass(frozen=True, slots=True)
class Bonds:
    """Which inputs belong together: `order` [in] says which is rounded when, `root` [in, in], in that order, who makes up for whom."""

    order: Tensor
    root: Tensor


def bonds_of(correlation: Tensor, factors: Tensor | None = None) -> Bonds:
    """Of inputs x with this sum of x xᵀ, or of x / `factors`. The loudest go first, while most can still make up for them.

    The root is the upper triangular U with UᵀU = C⁻¹, C the damped correlation.
    """
    seen = correlation if factors is None else correlation / factors / factors[:, None]
    order = seen.diagonal().argsort(descending=True)
    mean = seen.diagonal().mean()
    if not mean > 0:
        return Bonds(order, torch.eye(len(seen)))
    damped = seen[order][:, order].div_(mean)
    damped.diagonal().add_(DAMPING)
    lower: Tensor = torch.linalg.cholesky(damped)
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return Bonds(order, upper)


def compensated_int4(weight: Tensor, group: int, zero_points: bool, bonds: Bonds) -> Int4Weight:
    """weight [out, in] of any float dtype, with the scales of `quantise_int4` and codes that `bonds` choose. Finite numbers only."""
    nearest, root = quantise_int4(weight, group, zero_points), bonds.root
    scales = nearest.scales.float().T.contiguous()  # [groups, out]: one input's are in one piece, as its weights
    inverses = torch.where(scales.abs() < LEAST, 0.0, 1 / scales)
    begins = scales * -8 if nearest.minimums is None else nearest.minimums.float().T.contiguous()
    left = weight.float().T[bonds.order]  # [in, out]: what is still to be rounded, with the errors so far in it
    codes = nearest.codes.T.contiguous()
    for first in range(0, len(left), _BLOCK):
        block = slice(first, min(first + _BLOCK, len(left)))
        errors = torch.empty_like(left[block])
        for j, place in enumerate(bonds.order[block].tolist(), first):
            scale, inverse, begin = (some[place // group] for some in (scales, inverses, begins))
            picked = ((left[j] - begin) * inverse).round_().clamp_(0, 15)
            codes[place] = picked
            error = torch.div(left[j] - (picked * scale + begin), root[j, j], out=errors[j - first])
            left[j + 1 : block.stop].addr_(root[j, j + 1 : block.stop], error, alpha=-1)
        left[block.stop :].addmm_(root[block, block.stop :].T, errors, alpha=-1)
    return Int4Weight(codes.T.contiguous(), nearest.scales, nearest.minimums, group, nearest.inputs)
