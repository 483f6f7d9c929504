"""Token sampling on a GPU: temperature, top_k, top_p, min_p and the draw in one kernel, with one program per row.

The reference implementation is `sample_random_torch` of the engine. A filter's threshold is found by a search over all
floats in ascending order. Each pass over the row tests eight candidates, so eleven passes are enough for any
float. Rows without a filter skip its search.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 16  # elements of a row per block, and warps: eight sums per element stay in registers
_COLUMNS = ("temperature", "top_k", "top_p", "min_p")  # sampling parameters, in the order of the kernel's arguments
_UNALIGNED = (*(f"{name}s" for name in _COLUMNS), "uniforms")  # views of a step's buffer have any alignment


def sample_rows(logits: Tensor, columns: Mapping[str, Tensor], uniforms: Tensor, block: int = _BLOCK) -> Tensor:
    """Sample one token id per row of logits [rows, vocab]; -1 if a row is not finite.

    Args:
        logits: [rows, vocab] of any float dtype.
        columns: The sampling parameters of each row by name, [rows] each: `temperature` fp32 (0 selects the most
            likely token), `top_k` int32, `top_p` fp64 and `min_p` fp32. The engine's table gives their dtypes.
        uniforms: Random numbers in [0, 1), fp64 [rows].
        block: Elements of a row that are processed at a time.

    Returns:
        int64 [rows].
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parameters = (columns[name].contiguous() for name in _COLUMNS)
    given = (logits, *parameters, uniforms, out, logits.stride(0), vocab)
    if rows:
        _sample[(rows,)](*given, min(block, triton.next_power_of_2(vocab)), num_warps=_WARPS)
    return out


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, out, stride, vocab: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits + row * stride
    given = tl.load(temperatures + row)
    temperature = tl.maximum(given, 1e-6)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    largest, likeliest, finite = _likeliest(row_pointer, vocab, block)
    drawing = finite & (given > 0.0)
    largest = tl.where(finite, largest, 0.0) / temperature

    # Find the largest float that at least top_k scores reach.
    passes = tl.where(drawing & (top_k > 0) & (top_k < vocab), 11, 0)
    low, high = tl.full((), -2139095041, tl.int64), _float_rank(largest) + 1  # the search begins at -inf
    for _ in range(passes):
        width, bounds = _candidates(low, high)
        low, high = _narrow(_count_reaching(row_pointer, bounds, temperature, vocab, block) >= top_k, low, high, width)
    least_score = tl.where(passes > 0, _float_of_rank(high - 1), float("-inf"))

    # Find the smallest exponential above which the exponentials sum to less than top_p of the total. The
    # largest exponential is 1.
    none = tl.full((8,), 0.0, tl.float32) - 1.0
    total = tl.max(_mass_above(row_pointer, none, least_score, largest, temperature, vocab, block))
    passes = tl.where(drawing & (top_p < 1.0), 10, 0)
    low, high = tl.full((), 0, tl.int64), tl.full((), 0x3F800000, tl.int64)
    for _ in range(passes):
        width, bounds = _candidates(low, high)
        mass = _mass_above(row_pointer, bounds, least_score, largest, temperature, vocab, block)
        low, high = _narrow(mass >= top_p * total, low, high, width)
    least = tl.maximum(tl.where(passes > 0, _float_of_rank(high), 0.0), min_p)

    uniform = tl.load(uniforms + row)
    sampled = _sampled_id(row_pointer, uniform, least_score, least, largest, temperature, vocab, block)
    token = tl.where(drawing & (sampled < vocab), sampled, likeliest)
    tl.store(out + row, tl.where(finite, token, -1).to(tl.int64))


@triton.jit
def _likeliest(row_pointer, vocab: tl.constexpr, block: tl.constexpr):
    """Return the largest value of a row, the lowest id that has it, and True if all values are finite."""
    lane = tl.arange(0, block)
    best, ids = tl.full((block,), float("-inf"), tl.float32), tl.full((block,), 0, tl.int32)
    missing = tl.full((block,), 0, tl.int32)
    for start in range(0, vocab, block):
        values = tl.load(row_pointer + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        missing += (values != values).to(tl.int32)
        ids = tl.where(values > best, start + lane, ids)
        best = tl.where(values > best, values, best)
    largest = tl.max(best, 0)
    likeliest = tl.min(tl.where(best == largest, ids, vocab), 0)
    finite = (tl.sum(missing, 0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    return largest, likeliest, finite


@triton.jit
def _float_rank(value):
    """Return the rank of a float among all floats in ascending order; 0 has rank 0."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483649 - bits, bits)


@triton.jit
def _float_of_rank(place):
    return tl.where(place < 0, -2147483649 - place, place).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _candidates(low, high):
    """Return the distance between eight evenly spaced ranks from `low` to `high`, and the floats at them."""
    width = (high - low + 7) // 8
    return width, _float_of_rank(tl.minimum(low + tl.arange(0, 8) * width, high))


@triton.jit
def _narrow(below, low, high, width):
    """Return the remaining search range, given which of the eight candidates are below the threshold.

    `high` is never below it. The remaining range is one eighth, less one.
    """
    count = tl.sum(below.to(tl.int32), 0).to(tl.int64)
    upper = tl.where(count < 8, tl.minimum(low + count * width, high), high)
    return tl.minimum(tl.where(count == 0, low, low + (count - 1) * width + 1), upper), upper


@triton.jit
def _count_reaching(row_pointer, bounds, temperature, vocab: tl.constexpr, block: tl.constexpr):
    """Count the scores that are at least each of eight bounds."""
    lane = tl.arange(0, block)
    counts = tl.full((8, block), 0, tl.int32)
    for start in range(0, vocab, block):
        inside = start + lane < vocab
        scores = tl.load(row_pointer + start + lane, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        counts += ((scores[None, :] >= bounds[:, None]) & inside[None, :]).to(tl.int32)
    return tl.sum(counts, 1)


@triton.jit
def _mass_above(row_pointer, bounds, least_score, largest, temperature, vocab: tl.constexpr, block: tl.constexpr):
    """Return the sums of the exponentials above each of eight bounds, fp64."""
    lane = tl.arange(0, block)
    sums = tl.full((8, block), 0.0, tl.float32)
    for start in range(0, vocab, block):
        values = _exponentials(row_pointer, start + lane, least_score, largest, temperature, vocab)
        sums += tl.where(values[None, :] > bounds[:, None], values[None, :], 0.0)
    return tl.sum(sums.to(tl.float64), 1)


@triton.jit
def _exponentials(row_pointer, at, least_score, largest, temperature, vocab: tl.constexpr):
    """Return the exponentials of the scores that pass top_k, and 0 for the others."""
    scores = tl.load(row_pointer + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature
    return tl.where(scores >= least_score, tl.exp(scores - largest), 0.0)


@triton.jit
def _sampled_id(
    row_pointer, uniform, least_score, least, largest, temperature, vocab: tl.constexpr, block: tl.constexpr
):
    """Return the first token whose running sum of candidate probabilities exceeds its share.

    The result is `vocab` if there is none.
    """
    lane = tl.arange(0, block)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, block):
        values = _exponentials(row_pointer, start + lane, least_score, largest, temperature, vocab)
        total += tl.sum(tl.where(values >= least, values, 0.0).to(tl.float64), 0)
    target, running = uniform * total, tl.full((), 0.0, tl.float64)
    first, before = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, block):
        values = _exponentials(row_pointer, start + lane, least_score, largest, temperature, vocab)
        after = running + tl.sum(tl.where(values >= least, values, 0.0).to(tl.float64), 0)
        here = (running <= target) & (target < after)
        first, before = tl.where(here, start, first), tl.where(here, running, before)
        running = after
    values = _exponentials(row_pointer, first + lane, least_score, largest, temperature, vocab)
    candidates = tl.where(values >= least, values, 0.0).to(tl.float64)
    sums = tl.cumsum(candidates, 0)
    # The cumulative sum of a block may differ in its last bit from the block's sum above: the last candidate
    # takes the remainder.
    last = tl.max(tl.where(candidates > 0.0, first + lane, -1), 0)
    passed = tl.min(tl.where((candidates > 0.0) & (sums > target - before), first + lane, vocab), 0)
    return tl.where((passed >= vocab) & (last >= 0), last, passed)
