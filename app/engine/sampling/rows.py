"""Sampling of many rows of logits at once: the table of sampling parameters, penalties, filters and random numbers.

`COLUMNS` declares each parameter for the sampler of the CPU, the input block of a device, the device's sampler and its
Triton kernel. A new parameter is a row there, its effect in `_filter`, and its effect in the Triton kernel.

Every filter is a threshold, so tied tokens stay together. The CPU finds it by sorting, a device by bisection over the
bits of a float, which is exact and needs no host values, so it can be captured. Triton's kernels narrow the range first.

Random numbers depend only on a seed and a position, so neither the batch nor a preemption changes a token.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from app.engine.scheduler.batch import NOT_FINITE, Sequence
from app.messages import FIRST_VECTOR_ID, SamplingParams
from armature_kernels.triton.support import agrees_with_reference, triton_usable

MIN_TEMPERATURE = (
    1e-6  # smaller temperatures and repetition penalties are raised to it; an overflow would look like a broken model
)
_MAX_INT32 = 2**31 - 1
_BELOW_ONE = 1.0 - 2.0**-53
# tokens per block; probabilities are summed by block before one token is selected, which keeps the running sum
# short
_SUM_BLOCK = 256
_NUCLEUS_WIDTHS = (
    256,
    4096,
)  # most nuclei are found among this number of most likely tokens; sorting a whole vocabulary costs 30 times as much
# sum of the bits of a negative float, read as int32, and its index in the ascending order of all floats
_NEGATIVE_RANK_SUM = -(2**31) - 1
_RANK_OF_MINUS_INF = _NEGATIVE_RANK_SUM + 2**23  # the index of -inf; 0 has index 0
# Rows by which the kernels are compared; one may differ, since sums of probabilities are rounded differently.
_COMPARED_ROWS = 40
_BISECTION_ROUNDS, _BISECTION_ROUNDS_TO_ONE = (
    32,
    30,
)  # there are fewer than 2^32 floats, and fewer than 2^30 between 0 and 1
TensorColumns = Mapping[str, Tensor]  # for each of `COLUMNS` by name, a tensor [rows] of its dtype
Threshold = Callable[[Tensor, Tensor], Tensor]  # (scores or probabilities [rows, vocab], column [rows]) -> [rows, 1]
# ---- random numbers ------------------------------------------------------------------------------------------------

# SplitMix64 from Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; it passes
# BigCrush.
Bits = TypeVar("Bits", int, NDArray[Any])
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


# ---- the table of sampling parameters ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplerColumn:
    """A sampling parameter that the samplers read for every row.

    `neutral` has no effect, and padding rows hold it; for the temperature it selects the most likely token. `values`
    reads the parameter of each row. Steps of rows with neutral values skip a filter.
    """

    name: str
    dtype: torch.dtype
    neutral: float
    values: Callable[[abc.Sequence[SamplingParams]], list[float]]
    is_filter: bool = True

    @property
    def array_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def is_neutral(self, params: abc.Sequence[SamplingParams]) -> bool:
        return self.values(params).count(self.neutral) == len(params)


COLUMNS: tuple[SamplerColumn, ...] = (
    SamplerColumn(
        "temperature",
        torch.float32,
        0.0,
        lambda params: [0.0 if one.greedy else max(one.temperature, MIN_TEMPERATURE) for one in params],
        is_filter=False,
    ),
    SamplerColumn("top_k", torch.int32, 0, lambda params: [min(one.top_k, _MAX_INT32) for one in params]),
    SamplerColumn("top_p", torch.float64, 1.0, lambda params: [one.top_p for one in params]),
    SamplerColumn("min_p", torch.float32, 0.0, lambda params: [one.min_p for one in params]),
)
FILTERS = tuple(column for column in COLUMNS if column.is_filter)


def filters_of(params: abc.Sequence[SamplingParams]) -> tuple[str, ...]:
    return tuple(column.name for column in FILTERS if not column.is_neutral(params))


def tensor_columns(params: abc.Sequence[SamplingParams], device: torch.device | None = None) -> TensorColumns:
    return {column.name: torch.tensor(column.values(params), dtype=column.dtype, device=device) for column in COLUMNS}


# ---- penalties and filters -----------------------------------------------------------------------------------------


def select_rows(values: Tensor, rows: list[int] | Tensor) -> Tensor:
    """Return some rows of values [rows, vocab], in ascending order; all rows without a copy."""
    return values if len(rows) == len(values) else values[rows]


def rows_not_finite(*largest: Tensor) -> list[int]:
    """Return the rows whose maximum is not finite (a NaN, a +inf, or only -inf), from maxima of [rows] each."""
    finite = largest[0].isfinite()
    for others in largest[1:]:
        finite &= others.isfinite()
    if bool(finite.all()):
        return []
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()
    return rows


def apply_penalties(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
    """Return a float32 copy of logits [rows, vocab] with each sequence's penalties and biases applied.

    The repetition penalty counts prompt and completion, as in transformers, without an encoder's source; presence and
    frequency penalties the completion alone, as in the OpenAI API. Tokens are counted again at each step.
    """
    scores = logits.to(torch.float32, copy=True)
    for row, sequence in enumerate(sequences):
        if sequence.params.changes_scores:
            _apply_penalties_to_row(scores[row], sequence)
    return scores


def _apply_penalties_to_row(scores: Tensor, sequence: Sequence) -> None:
    params, num_prompt = sequence.params, sequence.num_prompt_tokens
    if params.repetition_penalty != 1.0:
        ids = set(sequence.token_ids[sequence.num_source_tokens :])
        if sequence.vectors:
            ids = {token for token in ids if token < FIRST_VECTOR_ID}
        seen = torch.tensor(list(ids), device=scores.device)
        values, penalty = scores[seen], max(params.repetition_penalty, MIN_TEMPERATURE)
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.num_completion_tokens and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(sequence.token_ids[num_prompt:])
        completion_ids, occurrences = torch.tensor([list(counts.keys()), list(counts.values())], device=scores.device)
        scores[completion_ids] -= occurrences * params.frequency_penalty + params.presence_penalty
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias


@dataclass(frozen=True, slots=True)
class ThresholdSearch:
    top_k: Threshold
    top_p: Threshold


def filtered_probabilities(scores: Tensor, params: abc.Sequence[SamplingParams]) -> Tensor:
    """Return filtered probabilities from scores [rows, vocab] float32, which are overwritten.

    Temperature, top_k, top_p and min_p are applied in this order. Filtered tokens have probability 0, and the rest need
    not sum to 1.
    """
    return _filter(scores, tensor_columns(params, scores.device), filters_of(params), _BY_SORTING)


def _filter(scores: Tensor, columns: TensorColumns, filters: Collection[str], search: ThresholdSearch) -> Tensor:
    scores.div_(columns["temperature"].clamp(min=MIN_TEMPERATURE).unsqueeze(1))
    if "top_k" in filters:
        scores.masked_fill_(scores < search.top_k(scores, columns["top_k"]), -torch.inf)
    # computed in place; writing new memory costs more than the arithmetic
    probs = torch.softmax(scores, -1, out=scores)
    if "top_p" in filters or "min_p" in filters:
        threshold = columns["min_p"].unsqueeze(1) * probs.amax(-1, keepdim=True)
        threshold = torch.maximum(threshold, search.top_p(probs, columns["top_p"]))
        probs.masked_fill_(probs < threshold, 0.0)
    return probs


def _top_k_by_sorting(scores: Tensor, top_k: Tensor) -> Tensor:
    """Return the k-th largest score of each row, [rows, 1]; -inf if k is off."""
    threshold = scores.new_full((len(scores), 1), -torch.inf)
    rows = ((top_k > 0) & (top_k < scores.shape[1])).nonzero().squeeze(1)
    if len(rows):
        last = top_k[rows].long().unsqueeze(1) - 1
        best = select_rows(scores, rows).topk(int(last.max()) + 1).values
        threshold[rows] = best.gather(1, last)
    return threshold


def _top_p_by_sorting(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest probability in each row's nucleus, [rows, 1]; 0 if top_p is off."""
    threshold = probs.new_zeros((len(probs), 1))
    pending = (top_p < 1.0).nonzero().squeeze(1)
    limits = top_p.unsqueeze(1)
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


def _top_k_by_bisection(scores: Tensor, top_k: Tensor) -> Tensor:
    """Return the largest float that at least k scores of the row reach, [rows, 1]; -inf if k is off."""

    def too_few(bound: Tensor) -> Tensor:
        return (scores >= bound).sum(-1, keepdim=True) < k

    k = top_k.long().unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    lowest = torch.full_like(k, _RANK_OF_MINUS_INF)
    threshold = _float_of_rank(_first_rank(too_few, lowest, _float_rank(largest) + 1, _BISECTION_ROUNDS) - 1)
    return threshold.masked_fill((k <= 0) | (k >= scores.shape[1]), -torch.inf)


def _top_p_by_bisection(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest float above which probabilities sum to less than top_p, [rows, 1]; 0 if it is off."""

    def enough(bound: Tensor) -> Tensor:
        return torch.where(probs > bound, probs, 0.0).sum(-1, keepdim=True, dtype=torch.float64) < limits

    limits = top_p.double().unsqueeze(1)
    largest = _float_rank(probs.amax(-1, keepdim=True))  # the most likely token stays for every top_p
    return _float_of_rank(
        _first_rank(enough, torch.zeros_like(largest), largest, _BISECTION_ROUNDS_TO_ONE)
    ).masked_fill(limits >= 1.0, 0.0)


_BY_SORTING = ThresholdSearch(_top_k_by_sorting, _top_p_by_sorting)
_BY_BISECTION = ThresholdSearch(_top_k_by_bisection, _top_p_by_bisection)


def _first_rank(predicate: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Return the first index in [low, high] from which on `predicate` is true; it is true at `high`."""
    for _ in range(rounds):
        middle = (low + high) >> 1
        found = predicate(_float_of_rank(middle))
        low, high = torch.where(found, low, torch.minimum(middle + 1, high)), torch.where(found, middle, high)
    return high


def _float_rank(values: Tensor) -> Tensor:
    """Return each fp32 value's int64 index in the order of all floats (inverse: `_float_of_rank`)."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, _NEGATIVE_RANK_SUM - bits, bits)


def _float_of_rank(rank: Tensor) -> Tensor:
    return torch.where(rank < 0, _NEGATIVE_RANK_SUM - rank, rank).to(torch.int32).view(torch.float32)


def multinomial(probs: Tensor, uniforms: abc.Sequence[float]) -> Tensor:
    """Sample one id per row of probabilities [rows, vocab], where the running sum exceeds its uniform number."""
    return multinomial_on_device(probs, torch.tensor(uniforms, dtype=torch.float64, device=probs.device))


def multinomial_on_device(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token id per row, with uniform numbers [rows] float64 on the same device, without a synchronization.

    Tokens are in vocabulary order: a rounding difference then moves boundaries slightly instead of swapping two tokens.
    The search has two stages, over blocks and within one, because a float64 sum over a whole vocabulary is slow.
    """
    missing = -probs.shape[1] % _SUM_BLOCK
    blocks = (F.pad(probs, (0, missing)) if missing else probs).view(len(probs), -1, _SUM_BLOCK)
    block, rest = _locate_in_cumsum(blocks.sum(-1).double(), uniforms)
    chosen = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, _SUM_BLOCK)).squeeze(1)
    inside, _ = _locate_in_cumsum(chosen.double(), rest)
    return block * _SUM_BLOCK + inside


def _locate_in_cumsum(mass: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose running sum exceeds `fraction` [rows] of the total, and the offset in it, [0, 1)."""
    running = mass.cumsum(-1)
    target = fraction * running[:, -1]
    # always a valid index: target < total, since fraction < 1
    index = (running <= target.unsqueeze(1)).sum(-1, keepdim=True)
    here = mass.gather(1, index).squeeze(1)  # greater than 0, because the sum grew at this index
    before = running.gather(1, index).squeeze(1) - here
    return index.squeeze(1), ((target - before) / here).clamp_(0.0, _BELOW_ONE)


# ---- sampling on the device that holds the logits ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a device step's rows, and a uniform number fp64 [rows] in [0, 1) for each."""

    columns: TensorColumns
    uniforms: Tensor


def sample_greedy(logits: Tensor) -> Tensor:
    """Return the first most likely id of logits [rows, vocab], int64 [rows]; `NOT_FINITE` if its logit is not finite."""
    if triton_usable(logits) and _kernels_agree(logits):
        from armature_kernels.triton.sampling import likeliest_ids

        return likeliest_ids(logits)
    return sample_greedy_torch(logits)


def sample_greedy_torch(logits: Tensor) -> Tensor:
    best, ids = logits.max(-1)  # faster than `argmax` in bfloat16
    return torch.where(best.isfinite(), ids, NOT_FINITE)


def sample_random(logits: Tensor, sampling: SamplingTensors, filtered: bool = True) -> Tensor:
    """Sample one id per row of logits [rows, vocab], int64 [rows]; `NOT_FINITE` for rows that are not finite."""
    if triton_usable(logits) and _kernels_agree(logits):
        from armature_kernels.triton.sampling import sample_rows

        return sample_rows(logits, sampling.columns, sampling.uniforms, filtered)
    return sample_random_torch(logits, sampling, filtered)


def _kernels_agree(logits: Tensor) -> bool:
    case = (logits.shape[1], logits.dtype)
    return agrees_with_reference("sampling", case, lambda: share_sampled_differently(logits))


def share_sampled_differently(like: Tensor) -> float:
    """Return the share of rows that the kernels sample differently, of random rows with the vocabulary and dtype of `like`."""
    from armature_kernels.triton.sampling import likeliest_ids, sample_rows

    where, rows = like.device, _COMPARED_ROWS
    generator = torch.Generator(where).manual_seed(0)
    logits = 3 * torch.randn(rows, like.shape[1], generator=generator, device=where)
    logits[0, 1] = torch.nan
    logits, numbers = logits.to(like.dtype), torch.arange(rows, device=where)
    values = {
        "temperature": (numbers % 5) / 4, "top_k": numbers % 3 * 20, "top_p": 1 - numbers % 4 / 10, "min_p": numbers % 7 / 100
    }  # fmt: skip
    columns = {column.name: values[column.name].to(column.dtype) for column in COLUMNS}
    uniforms = torch.rand(rows, generator=generator, device=where, dtype=torch.float64)
    sampled = sample_rows(logits, columns, uniforms, True), likeliest_ids(logits)
    expected = sample_random_torch(logits, SamplingTensors(columns, uniforms)), sample_greedy_torch(logits)
    return max(float((one != twin).float().mean()) for one, twin in zip(sampled, expected, strict=True))


def sample_random_torch(logits: Tensor, sampling: SamplingTensors, filtered: bool = True) -> Tensor:
    likeliest = sample_greedy_torch(logits)
    filters = [column.name for column in FILTERS] if filtered else []
    probs = _filter(logits.to(torch.float32, copy=True), sampling.columns, filters, _BY_BISECTION)
    drawn = multinomial_on_device(probs, sampling.uniforms)
    return torch.where((sampling.columns["temperature"] > 0) & (likeliest != NOT_FINITE), drawn, likeliest)


def uniform_number(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: number `position` of the stream of `seed`.

    The seed is mixed first: the seeds of one request's choices would give the same stream, shifted.
    """
    return (_splitmix64(stream_start(seed) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def stream_start(seed: int) -> int:
    return _splitmix64(seed)


def uniform_numbers(streams: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """Return one number per stream (uint64), each at its position. uint64 arithmetic wraps without a mask."""
    bits: NDArray[Any] = _splitmix64(streams + (positions + 1).astype(streams.dtype) * _GAMMA)
    numbers: NDArray[Any] = (bits >> 11) * 2.0**-53
    return numbers


def _splitmix64(bits: Bits) -> Bits:
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
