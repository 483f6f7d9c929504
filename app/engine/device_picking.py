"""Picks tokens where the logits lie, with nothing that a host would have to say or wait for: it can be recorded, and run again.

The same semantics as `sampling_rows.py`, which serves what needs more. A filter's threshold is found by halving what it may be, in the
bits of a float, instead of by sorting a vocabulary: as many rounds as a float has bits, and exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.sampling_rows import LEAST_TEMPERATURE, draw_at
from app.kernels.gpu.available import usable

NOT_FINITE = -1  # in place of a token's id: the row has a NaN, or +inf, or nothing but -inf
_BELOW_ALL = -(2**31) - 1  # what the bits of a negative float, as int32, and its place among all floats sum to
_LOWEST = _BELOW_ALL + 2**23  # the place of -inf; 0 has place 0
_ROUNDS, _ROUNDS_TO_ONE = 32, 30  # fewer than 2^32 places are a float's, and fewer than 2^30 one between 0 and 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """How each row draws, [rows]: `temperature`, `min_p` fp32, `top_p`, `uniforms` fp64, `top_k` int32 (0: off).

    A row of temperature 0 takes the likeliest token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor


def pick_greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits [rows, vocab], the lowest id among equals; `NOT_FINITE` where there is none."""
    best, ids = logits.max(-1)
    return torch.where(best.isfinite(), ids, NOT_FINITE)


def pick_drawn(logits: Tensor, drawing: Drawing, filtered: bool = True) -> Tensor:
    """One token id a row, drawn by its number; `NOT_FINITE` where none can be. Not `filtered`: no row has any of the three filters on."""
    if usable(logits):
        from app.kernels.gpu.draws import drawn_rows

        return drawn_rows(logits, drawing.temperature, (drawing.top_k, drawing.top_p, drawing.min_p), drawing.uniforms)
    return pick_drawn_torch(logits, drawing, filtered)


def rows_held(place: Tensor) -> int:
    """Rows of fp32 that `pick_drawn` holds for each row of logits that lie where this lies: none where it is one kernel."""
    return 0 if usable(place) else 4


def pick_drawn_torch(logits: Tensor, drawing: Drawing, filtered: bool = True) -> Tensor:
    """The twin."""
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
    """The k-th largest score of each row, [rows, 1]: the largest float that k scores reach; -inf where k is off."""

    def too_few(bound: Tensor) -> Tensor:
        return (scores >= bound).sum(-1, keepdim=True) < wanted

    wanted = top_k.long().unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    lowest = torch.full_like(wanted, _LOWEST)
    threshold = _float_at(_first(too_few, lowest, _place(largest) + 1, _ROUNDS) - 1)
    return threshold.masked_fill((wanted <= 0) | (wanted >= scores.shape[1]), -torch.inf)


def _top_p_threshold(shares: Tensor, drawing: Drawing) -> Tensor:
    """[rows, 1]: the least float above which the shares sum to less than top_p, so that the last token needed stays. 0 where off."""

    def enough(bound: Tensor) -> Tensor:
        return torch.where(shares > bound, shares, 0.0).sum(-1, keepdim=True, dtype=torch.float64) < limits

    limits = drawing.top_p.double().unsqueeze(1)
    largest = _place(shares.amax(-1, keepdim=True))  # stays whatever top_p is
    return _float_at(_first(enough, torch.zeros_like(largest), largest, _ROUNDS_TO_ONE)).masked_fill(limits >= 1.0, 0.0)


def _first(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """The first place in [low, high] from where on it holds; it is taken to hold at `high`."""
    for _ in range(rounds):
        middle = (low + high) >> 1
        found = holds(_float_at(middle))
        low, high = torch.where(found, low, torch.minimum(middle + 1, high)), torch.where(found, middle, high)
    return high


def _place(values: Tensor) -> Tensor:
    """Of fp32 values among all floats in ascending order, int64. Its inverse is `_float_at`; both zeros are equal to a comparison."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, _BELOW_ALL - bits, bits)


def _float_at(place: Tensor) -> Tensor:
    return torch.where(place < 0, _BELOW_ALL - place, place).to(torch.int32).view(torch.float32)
