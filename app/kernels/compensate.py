"""Four-bit quantisation by GPTQ: weights that are not yet rounded compensate for the rounding error of those that are.

It needs the correlation of a product's inputs, collected from text. Rows of the weight are independent, so they
may be given in any parts. Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.rounding import LEAST, Int4Weight, quantise_int4

# Added to the diagonal, as a share of its mean: correlations that the text did not show are not relied on.
DAMPING = 0.1
_BLOCK = 128  # inputs whose errors are propagated together, in one product


@dataclass(frozen=True, slots=True)
class Bonds:
    """The order in which inputs are rounded, and the factor that propagates rounding errors.

    `rounding_order` int64 [in] lists inputs in rounding order. `inverse_root` fp32 [in, in], in that order, is the upper triangular
    factor of the inverse Hessian.
    """

    order: Tensor
    root: Tensor


def bonds_of(correlation: Tensor, factors: Tensor | None = None) -> Bonds:
    """Compute the rounding order and the error propagation factor from the sum of x xᵀ [in, in] over inputs x.

    With `factors` [in], the inputs are x / factors. Inputs with the largest mean square are rounded first, while
    most other inputs can still compensate for them. The root is the upper triangular U with UᵀU = C⁻¹, where C is
    the damped correlation.
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
    """Quantise weight [out, in] of any float dtype to four bits, with codes chosen by GPTQ.

    The scales are those of `quantise_int4`. All values must be finite.
    """
    nearest, root = quantise_int4(weight, group, zero_points), bonds.root
    scales = nearest.scales.float().T.contiguous()  # [groups, out]: contiguous for one input, like its weights
    inverses = torch.where(scales.abs() < LEAST, 0.0, 1 / scales)
    begins = scales * -8 if nearest.minimums is None else nearest.minimums.float().T.contiguous()
    left = weight.float().T[bonds.order]  # [in, out]: weights still to be rounded, with the errors so far added
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
