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

from app.engine.sampling.rows import (
    MIN_TEMPERATURE,
    multinomial_on_device,
)
from app.kernels.triton.support import triton_usable

NOT_FINITE = -1  # returned instead of a token id if the row has a NaN or +inf, or only -inf
# sum of the bits of a negative float, read as int32, and its index in the ascending order of all floats
_NEGATIVE_RANK_SUM = -(2**31) - 1
_RANK_OF_MINUS_INF = _NEGATIVE_RANK_SUM + 2**23  # the index of -inf; 0 has index 0
_BISECTION_ROUNDS, _BISECTION_ROUNDS_TO_ONE = (
    32,
    30,
)  # there are fewer than 2^32 floats, and fewer than 2^30 between 0 and 1


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of each row, tensors [rows].

    `temperature` and `min_p` are fp32, `top_p` and `uniforms` fp64, `top_k` int32 (0: off). A row with temperature
    0 takes the most likely token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor


def sample_greedy(logits: Tensor) -> Tensor:
    """Return the most likely token id of each row of logits [rows, vocab], int64 [rows].

    Among equal logits the lowest id is taken. The id is `NOT_FINITE` if the row has no finite maximum.
    """
    best, ids = logits.max(-1)
    return torch.where(best.isfinite(), ids, NOT_FINITE)


def sample_random(logits: Tensor, sampling: SamplingTensors, filtered: bool = True) -> Tensor:
    """Sample one token id for each row of logits [rows, vocab] with the row's uniform number; int64 [rows].

    A row gets `NOT_FINITE` if its logits are not finite. `filtered` False means that no row uses top_k, top_p or
    min_p.
    """
    if triton_usable(logits):
        from app.kernels.triton.sampling import sample_rows

        return sample_rows(
            logits, sampling.temperature, (sampling.top_k, sampling.top_p, sampling.min_p), sampling.uniforms
        )
    return sample_random_torch(logits, sampling, filtered)


def scratch_rows(logits_like: Tensor) -> int:
    """Return the number of fp32 rows that `sample_random` allocates for each row of logits.

    It is 0 if sampling is one kernel on this device, else 4.
    """
    return 0 if triton_usable(logits_like) else 4


def sample_random_torch(logits: Tensor, sampling: SamplingTensors, filtered: bool = True) -> Tensor:
    """Compute `sample_random` with torch operations."""
    likeliest = sample_greedy(logits)
    scores = logits.float() / sampling.temperature.clamp(min=MIN_TEMPERATURE).unsqueeze(1)
    if filtered:
        scores.masked_fill_(scores < _top_k_threshold(scores, sampling.top_k), -torch.inf)
    probs = scores.softmax(-1)
    if filtered:
        least = sampling.min_p.unsqueeze(1) * probs.amax(-1, keepdim=True)
        probs.masked_fill_(probs < torch.maximum(least, _top_p_threshold(probs, sampling)), 0.0)
    drawn = multinomial_on_device(probs, sampling.uniforms)
    return torch.where((sampling.temperature > 0) & (likeliest != NOT_FINITE), drawn, likeliest)


def _top_k_threshold(scores: Tensor, top_k: Tensor) -> Tensor:
    """Return the k-th largest score of each row, [rows, 1].

    It is the largest float that at least k scores reach, or -inf if k is off.
    """

    def too_few(bound: Tensor) -> Tensor:
        return (scores >= bound).sum(-1, keepdim=True) < k

    k = top_k.long().unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    lowest = torch.full_like(k, _RANK_OF_MINUS_INF)
    threshold = _float_of_rank(_first_rank(too_few, lowest, _float_rank(largest) + 1, _BISECTION_ROUNDS) - 1)
    return threshold.masked_fill((k <= 0) | (k >= scores.shape[1]), -torch.inf)


def _top_p_threshold(probs: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the smallest float above which the probabilities sum to less than top_p, [rows, 1]; 0 if top_p is off.

    With this threshold, the last token that is needed to reach top_p stays.
    """

    def enough(bound: Tensor) -> Tensor:
        return torch.where(probs > bound, probs, 0.0).sum(-1, keepdim=True, dtype=torch.float64) < limits

    limits = sampling.top_p.double().unsqueeze(1)
    largest = _float_rank(probs.amax(-1, keepdim=True))  # the most likely token stays for every top_p
    return _float_of_rank(
        _first_rank(enough, torch.zeros_like(largest), largest, _BISECTION_ROUNDS_TO_ONE)
    ).masked_fill(limits >= 1.0, 0.0)


def _first_rank(predicate: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Return the first index in [low, high] from which on `predicate` is true.

    It is assumed to be true at `high`.
    """
    for _ in range(rounds):
        middle = (low + high) >> 1
        found = predicate(_float_of_rank(middle))
        low, high = torch.where(found, low, torch.minimum(middle + 1, high)), torch.where(found, middle, high)
    return high


def _float_rank(values: Tensor) -> Tensor:
    """Return the index of each fp32 value in the ascending order of all floats, int64.

    `_float_at` is the inverse. The two zeros have different bits but compare equal.
    """
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, _NEGATIVE_RANK_SUM - bits, bits)


def _float_of_rank(rank: Tensor) -> Tensor:
    return torch.where(rank < 0, _NEGATIVE_RANK_SUM - rank, rank).to(torch.int32).view(torch.float32)
