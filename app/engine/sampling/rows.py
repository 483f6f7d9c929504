"""Sampling computations on many rows of logits at once, each with individual parameters.

The sampler decides which row needs which computation. Every filter is a threshold: a token stays if it is at least
as likely as the last one that must stay, so tied tokens stay together.

Counter-based random numbers that depend only on a seed and a position.

There is no state, so neither the batch nor a preemption changes a sampled token.
"""

from __future__ import annotations

from collections import Counter, abc
from typing import (
    Any,
    TypeVar,
)

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from app.engine.scheduler.sequence import Sequence
from app.errors import StepFailed
from app.messages import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-53
# tokens per block; probabilities are summed by block before one token is selected, which keeps the running sum
# short
_SUM_BLOCK = 256
MIN_TEMPERATURE = (
    1e-6  # smaller temperatures and repetition penalties are raised to it; an overflow would look like a broken model
)
_NUCLEUS_WIDTHS = (
    256,
    4096,
)  # most nuclei are found among this number of most likely tokens; sorting a whole vocabulary costs 30 times as much


def select_rows(values: Tensor, rows: list[int] | Tensor) -> Tensor:
    """Return some rows of values [rows, vocab], in ascending order.

    If all rows are requested, they are not copied.
    """
    return values if len(rows) == len(values) else values[rows]


def require_finite(best: Tensor) -> None:
    """Check the largest logit of each row, `best` [rows].

    A NaN anywhere in a row, a +inf, or a row of only -inf makes the maximum non-finite.

    Raises:
        StepFailed: The maximum of a row is not finite.
    """
    if not bool(best.isfinite().all()):
        bad = int((~best.isfinite()).sum())
        raise StepFailed(
            f"The model's logits are not finite for {bad} of {len(best)} sequences of this step, so no token can be sampled."
        )


def apply_penalties(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
    """Return a float32 copy of logits [rows, vocab] with each sequence's penalties applied.

    The repetition penalty counts prompt and completion, as in transformers. Presence and frequency penalties count
    the completion alone, as in the OpenAI API. Tokens are counted again at each step, for rows with penalties
    only, so a preempted or forked sequence needs no bookkeeping.
    """
    scores = logits.to(torch.float32, copy=True)
    for row, sequence in enumerate(sequences):
        if sequence.params.has_penalties:
            _apply_penalties_to_row(scores[row], sequence)
    return scores


def _apply_penalties_to_row(scores: Tensor, sequence: Sequence) -> None:
    params, num_prompt = sequence.params, sequence.num_prompt_tokens
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(sequence.token_ids)), device=scores.device)
        values, penalty = scores[seen], max(params.repetition_penalty, MIN_TEMPERATURE)
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.num_completion_tokens and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(sequence.token_ids[num_prompt:])
        completion_ids, occurrences = torch.tensor([list(counts.keys()), list(counts.values())], device=scores.device)
        scores[completion_ids] -= occurrences * params.frequency_penalty + params.presence_penalty


def filtered_probabilities(scores: Tensor, params: abc.Sequence[SamplingParams]) -> Tensor:
    """Return filtered probabilities from scores [rows, vocab] float32, which are overwritten.

    Temperature, top_k, top_p and min_p are applied in this order. Filtered tokens have probability 0. The
    remaining probabilities need not sum to 1.
    """
    scores.div_(_column_tensor([max(one.temperature, MIN_TEMPERATURE) for one in params], scores))
    vocab_size = scores.shape[1]
    if any(0 < one.top_k < vocab_size for one in params):
        scores.masked_fill_(scores < _top_k_threshold(scores, [one.top_k for one in params]), -torch.inf)
    # computed in place; writing new memory costs more than the arithmetic
    probs = torch.softmax(scores, -1, out=scores)
    if any(one.top_p < 1.0 or one.min_p > 0.0 for one in params):
        threshold = _column_tensor([one.min_p for one in params], probs) * probs.amax(-1, keepdim=True)
        threshold = torch.maximum(threshold, _top_p_threshold(probs, [one.top_p for one in params]))
        probs.masked_fill_(probs < threshold, 0.0)
    return probs


def _column_tensor(values: list[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values as a column [rows, 1] on the device of `like`."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def multinomial(probs: Tensor, uniforms: abc.Sequence[float]) -> Tensor:
    """Sample one token id per row from probabilities [rows, vocab], with one uniform number per row.

    The sampled token is the one at which the running sum in vocabulary order exceeds the uniform number.
    """
    return multinomial_on_device(probs, torch.tensor(uniforms, dtype=torch.float64, device=probs.device))


def multinomial_on_device(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token id per row, with uniform numbers [rows] float64 on the same device.

    No host synchronization occurs.

    Tokens are in vocabulary order and not sorted by probability: a rounding difference in the logits then moves
    the boundaries slightly instead of swapping two tokens. The search has two stages, over blocks and then within
    one block, because a float64 running sum over a whole vocabulary is slow.
    """
    missing = -probs.shape[1] % _SUM_BLOCK
    blocks = (F.pad(probs, (0, missing)) if missing else probs).view(len(probs), -1, _SUM_BLOCK)
    block, rest = _locate_in_cumsum(blocks.sum(-1).double(), uniforms)
    chosen = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, _SUM_BLOCK)).squeeze(1)
    inside, _ = _locate_in_cumsum(chosen.double(), rest)
    return block * _SUM_BLOCK + inside


def _locate_in_cumsum(mass: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose running sum exceeds `fraction` [rows] of the row's total.

    Also returns the relative offset of the target within that index's mass, in [0, 1).
    """
    running = mass.cumsum(-1)
    target = fraction * running[:, -1]
    # always a valid index: target < total, since fraction < 1
    index = (running <= target.unsqueeze(1)).sum(-1, keepdim=True)
    here = mass.gather(1, index).squeeze(1)  # greater than 0, because the sum grew at this index
    before = running.gather(1, index).squeeze(1) - here
    return index.squeeze(1), ((target - before) / here).clamp_(0.0, _BELOW_ONE)


def _top_k_threshold(scores: Tensor, top_k: abc.Sequence[int]) -> Tensor:
    """Return the k-th largest score of each row, [rows, 1]; -inf if k is off."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < scores.shape[1]]
    counts = [top_k[row] for row in rows]
    best = select_rows(scores, rows).topk(max(counts)).values
    threshold = scores.new_full((len(scores), 1), -torch.inf)
    threshold[rows] = best.gather(1, _column_tensor([k - 1 for k in counts], scores, torch.int64))
    return threshold


def _top_p_threshold(probs: Tensor, top_p: abc.Sequence[float]) -> Tensor:
    """Return the smallest probability in each row's nucleus, [rows, 1]; 0 if top_p is off.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to at least top_p.
    """
    threshold = probs.new_zeros((len(probs), 1))
    pending = torch.tensor([row for row, p in enumerate(top_p) if p < 1.0], dtype=torch.int64, device=probs.device)
    limits = _column_tensor(list(top_p), probs, torch.float64)
    vocab_size = probs.shape[1]
    for width in (*(width for width in _NUCLEUS_WIDTHS if width < vocab_size), vocab_size):
        if len(pending) == 0:
            break
        best = select_rows(probs, pending).topk(width).values
        running = best.double().cumsum(-1)
        inside = (running - best < limits[pending]).sum(-1, keepdim=True).clamp_(min=1)
        threshold[pending] = best.gather(1, inside - 1)
        pending = pending[running[:, -1] < limits[pending].squeeze(1)]  # these rows need tokens beyond `width`
    return threshold


# SplitMix64 from Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; it passes
# BigCrush.
Bits = TypeVar("Bits", int, NDArray[Any])
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform_number(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: number `position` of the stream of `seed`.

    The seed is mixed before it becomes the start of a stream. Otherwise, seeds that differ by a multiple of the
    increment (the choices of one request do) would give the same stream, shifted.
    """
    return (_splitmix64(stream_start(seed) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def stream_start(seed: int) -> int:
    """Return the start state of a seed's stream."""
    return _splitmix64(seed)


def uniform_numbers(streams: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """Return one number per stream (`streams` uint64), each at its position.

    uint64 arithmetic wraps around without a mask.
    """
    bits: NDArray[Any] = _splitmix64(streams + (positions + 1).astype(streams.dtype) * _GAMMA)
    numbers: NDArray[Any] = (bits >> 11) * 2.0**-53
    return numbers


def _splitmix64(bits: Bits) -> Bits:
    """Return the SplitMix64 mix of an int, or of each element of a uint64 array."""
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
