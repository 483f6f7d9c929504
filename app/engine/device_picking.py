"""Sampling on the device that holds the logits, without host values or synchronization, so that it can be captured.

The semantics are those of the host sampler, which handles requests that need more. The threshold of a filter is
found by bisection over the bits of a float instead of by sorting the vocabulary. This takes as many rounds as a
float has bits, and is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.sampling_rows import LEAST_TEMPERATURE, draw_at
from app.kernels.gpu.available import usable

NOT_FINITE = -1  # returned instead of a token id if the row has a NaN or +inf, or only -inf
# sum of the bits of a negative float, read as int32, and its index in the ascending order of all floats
_BELOW_ALL = -(2**31) - 1
_LOWEST = _BELOW_ALL + 2**23  # the index of -inf; 0 has index 0
_ROUNDS, _ROUNDS_TO_ONE = 32, 30  # there are fewer than 2^32 floats, and fewer than 2^30 between 0 and 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """Sampling parameters of each row, tensors [rows].

    `temperature` and `min_p` are fp32, `top_p` and `uniforms` fp64, `top_k` int32 (0: off). A row with temperature
    0 takes the most likely token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor


def pick_greedy(logits: Tensor) -> Tensor:
    """Return the most likely token id of each row of logits [rows, vocab], int64 [rows].

    Among equal logits the lowest id is taken. The id is `NOT_FINITE` if the row has no finite maximum.
    """
    best, ids = logits.max(-1)
    return torch.where(best.isfinite(), ids, NOT_FINITE)


def pick_drawn(logits: Tensor, drawing: Drawing, filtered: bool = True) -> Tensor:
    """Sample one token id for each row of logits [rows, vocab] with the row's uniform number; int64 [rows].

    A row gets `NOT_FINITE` if its logits are not finite. `filtered` False means that no row uses top_k, top_p or
    min_p.
    """
    if usable(logits):
        from app.kernels.gpu.draws import drawn_rows

        return drawn_rows(logits, drawing.temperature, (drawing.top_k, drawing.top_p, drawing.min_p), drawing.uniforms)
    return pick_drawn_torch(logits, drawing, filtered)


def rows_held(place: Tensor) -> int:
    """Return the number of fp32 rows that `sample_random` allocates for each row of logits.

    It is 0 if sampling is one kernel on this device, else 4.
    """
    return 0 if usable(place) else 4


def pick_drawn_torch(logits: Tensor, drawing: Drawing, filtered: bool = True) -> Tensor:
    """Compute `sample_random` with torch operations."""
    likeliest = pick_greedy(logits)
    scores = logits.float() / drawing.temperature.clamp(min=LEAST_TEMPERATURE).unsqueeze(1)
    if filtered:
        scores.masked_fill_(scores < _top_k_threshold(scores, drawing.top_k), -torch.inf)
    shares = scores.softmax(-1)
    if filtered:
        least = drawing.min_p.unsqueeze(1) * shares.amax(-1, keepdim=True)
        shares.masked_fill_(shares < torch.maximum(least, _top_p_threshold(shares, drawing)), 0.0)
    drawn = draw_at(shares, drawing.uniforms)
    return torch.where((drawing.temperature > 0) & (likeliest != NOT_FINITE), drawn, likeliest)


def _top_k_threshold(scores: Tensor, top_k: Tensor) -> Tensor:
    """Return the k-th largest score of each row, [rows, 1].

    It is the largest float that at least k scores reach, or -inf if k is off.
    """

    def too_few(bound: Tensor) -> Tensor:
        return (scores >= bound).sum(-1, keepdim=True) < wanted

    wanted = top_k.long().unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    lowest = torch.full_like(wanted, _LOWEST)
    threshold = _float_at(_first(too_few, lowest, _place(largest) + 1, _ROUNDS) - 1)
    return threshold.masked_fill((wanted <= 0) | (wanted >= scores.shape[1]), -torch.inf)


def _top_p_threshold(shares: Tensor, drawing: Drawing) -> Tensor:
    """Return the smallest float above which the probabilities sum to less than top_p, [rows, 1]; 0 if top_p is off.

    With this threshold, the last token that is needed to reach top_p stays.
    """

    def enough(bound: Tensor) -> Tensor:
        return torch.where(shares > bound, shares, 0.0).sum(-1, keepdim=True, dtype=torch.float64) < limits

    limits = drawing.top_p.double().unsqueeze(1)
    largest = _place(shares.amax(-1, keepdim=True))  # the most likely token stays for every top_p
    return _float_at(_first(enough, torch.zeros_like(largest), largest, _ROUNDS_TO_ONE)).masked_fill(limits >= 1.0, 0.0)


def _first(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Return the first index in [low, high] from which on `predicate` is true.

    It is assumed to be true at `high`.
    """
    for _ in range(rounds):
        middle = (low + high) >> 1
        found = holds(_float_at(middle))
        low, high = torch.where(found, low, torch.minimum(middle + 1, high)), torch.where(found, middle, high)
    return high


def _place(values: Tensor) -> Tensor:
    """Return the index of each fp32 value in the ascending order of all floats, int64.

    `_float_at` is the inverse. The two zeros have different bits but compare equal.
    """
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, _BELOW_ALL - bits, bits)


def _float_at(place: Tensor) -> Tensor:
    return torch.where(place < 0, _BELOW_ALL - place, place).to(torch.int32).view(torch.float32)
