"""Token sampling on a GPU: the most likely token, temperature, top_k, top_p, min_p and the draw, in split rows.

The reference implementation is `sample_random_torch` of the engine. Each kernel has programs for every part of every
row. What the parts find is merged by atomic operations on a row of int64 numbers (`_BEST` and so on), and the last
program of a row continues with the merged numbers. A float is stored as its rank in the ascending order of all floats.
Exponentials are summed as fixed-point numbers, so the order of the sums changes nothing, nor does the size of a part.

A filter's threshold is one of the scores. Two passes narrow the range in which it lies: a histogram gives the number of
scores in each of 256 intervals, and so bounds of their exponentials' sums. Then the scores of the range are listed, and
one program searches the list. If they are too many, it searches the whole row, which is slow: many different scores
in less than a thousandth of the row's range, or more than 1,500 tokens by top_k together with top_p. Rows without
filters skip all of that. The parameters are views of a step's buffer: one compiled kernel serves any alignment.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from armature_kernels.triton.launch import launch_options, wait_for_inputs

_BLOCK = 1024  # elements of a row at a time
_WARPS, _SEARCH_WARPS = 8, 16
_LISTED = 2048  # most scores of a row that are listed
_FEW_ROWS, _BLOCKS_OF_MANY = 32, 8  # blocks of a part if there are more rows: enough programs, and fewer merges
_COLUMNS = ("temperature", "top_k", "top_p", "min_p")  # sampling parameters, in the order of the kernel's arguments

_NAN_RANK = tl.constexpr(2**32 - 1)
_WIDEST = tl.constexpr(32.0)  # scores so far below the largest have a fixed-point exponential of 0
_BINS = tl.constexpr(256)
_ALL_LISTED = tl.constexpr(2**33)  # in place of `_HIGH`: all scores from `_LOW` on are listed

# The numbers of a row.
_BEST = tl.constexpr(0)  # rank of the largest logit, and the lowest id that has it
_SMALLEST = tl.constexpr(1)  # 2^32 less the rank of the smallest logit that is not -inf
_ARRIVED = tl.constexpr(2)  # programs of the kernel that have merged their part
_LOW = tl.constexpr(3)  # the threshold is in the range [low, high) of scores
_HIGH = tl.constexpr(4)  # 0: no filter needs a threshold
_COUNT_ABOVE = tl.constexpr(5)  # scores from `_HIGH` on
_MASS_ABOVE = tl.constexpr(6)  # sum of their exponentials
_MASS = tl.constexpr(7)  # of all from `_LOW` on
_TOTAL = tl.constexpr(8)  # sum of the row's exponentials
_LENGTH = tl.constexpr(9)  # of the list
_LAST_LISTED = tl.constexpr(10)  # rank of the largest score in the list
_FIRST_LISTED = tl.constexpr(11)  # 2^32 less the rank of the smallest
_TOP_K = tl.constexpr(12)  # ranks of the thresholds; 0: none
_TOP_P = tl.constexpr(13)
_COUNTS = tl.constexpr(16)  # scores by interval, then the mass of each part
_NUMBERS, _NUMBERS_OF_GREEDY = 16 + 256, 16


def likeliest_ids(logits: Tensor) -> Tensor:
    """Return the first most likely id of each row of logits [rows, vocab]; -1 if its logit is not finite."""
    rows = _Rows(logits, _NUMBERS_OF_GREEDY, _BLOCK)
    rows.launch(_likeliest, None, None, None)
    return rows.ids


def sample_rows(
    logits: Tensor,
    columns: Mapping[str, Tensor],
    uniforms: Tensor,
    filtered: bool = True,
    block: int = _BLOCK,
    most_listed: int = _LISTED,
) -> Tensor:
    """Sample one token id per row of logits [rows, vocab]; -1 if a row is not finite.

    Args:
        logits: [rows, vocab] of any float dtype.
        columns: The sampling parameters of each row by name, [rows] each: `temperature` fp32 (0 selects the most
            likely token), `top_k` int32, `top_p` fp64 and `min_p` fp32. The engine's table gives their dtypes.
        uniforms: Random numbers in [0, 1), fp64 [rows].
        filtered: False if no row has top_k, top_p or min_p.
        block: Elements of a row that are processed at a time.
        most_listed: Scores of a row that are listed.

    Returns:
        int64 [rows].
    """
    rows = _Rows(logits, _NUMBERS, block)
    temperatures, top_ks, top_ps, min_ps = (columns[name].contiguous() for name in _COLUMNS)
    if not filtered:
        rows.launch(_likeliest, temperatures, None, None)
    else:
        rows.launch(_likeliest, temperatures, top_ks, top_ps)
        filters = (temperatures, top_ks, top_ps)
        for _ in range(2):
            rows.launch(_narrow, *filters, most_listed=most_listed)
        listed = torch.empty((len(logits), most_listed), dtype=torch.float32, device=logits.device)
        rows.launch(_threshold, *filters, listed, most_listed=most_listed, num_warps=_SEARCH_WARPS)
    rows.launch(_draw, temperatures, min_ps, uniforms)
    return rows.ids


class _Rows:
    """Rows of logits, the numbers of each row, and the ids that are sampled."""

    def __init__(self, logits: Tensor, num_numbers: int, block: int) -> None:
        self._logits = logits if logits.stride(1) == 1 else logits.contiguous()
        rows, vocab = logits.shape
        self.ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        self._numbers = torch.zeros((rows, num_numbers), dtype=torch.int64, device=logits.device)
        least = -(-vocab // (block * (_NUMBERS - _NUMBERS_OF_GREEDY)))  # blocks of a part, so that the masses have room
        self._part = block * max(least, 1 if rows <= _FEW_ROWS else _BLOCKS_OF_MANY)
        self._block = block

    def launch(self, kernel: triton.JITFunction, *arguments: Tensor | None, **sizes: int) -> None:
        rows, vocab = self._logits.shape
        if rows == 0:
            return
        strides = (self._logits.stride(0), self._numbers.stride(0))
        options = {"num_warps": _WARPS, **sizes, **launch_options()}
        kernel[(rows, triton.cdiv(vocab, self._part))](
            self._logits, *arguments, self._numbers, self.ids, *strides, self._part, vocab=vocab, block=self._block,
            **options,
        )  # fmt: skip


# ---- numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def _rank(value):
    """Return the rank of an fp32 value among all floats; both zeros have the same, and NaN has the last."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True).to(tl.int64)
    rank = tl.where(bits < 0, -1 - bits, bits + 2147483648)
    return tl.where(value == value, rank, _NAN_RANK)


@triton.jit
def _float(rank):
    bits = tl.where(rank < 2147483648, -1 - rank, rank - 2147483648)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _mass(score, largest, vocab: tl.constexpr):
    """Return the exponential of a score, relative to the largest one, in fixed point: a row's sum is below 2^63."""
    unit: tl.constexpr = 2.0**44 if vocab <= 2**18 else 2.0**62 / vocab
    return (tl.exp(score - largest) * unit).to(tl.int64)


@triton.jit
def _scores(row_logits, ids, end, temperature):
    """Return the scores of ids below `end`, and -inf for the others."""
    logits = tl.load(row_logits + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
    return logits / temperature


@triton.jit
def _temperature(temperatures, row):
    return tl.maximum(tl.load(temperatures + row), 1e-6)


@triton.jit
def _largest(row_numbers, temperature):
    return _float(tl.load(row_numbers + _BEST) >> 31) / temperature


@triton.jit
def _last_to_arrive(row_numbers):
    """Return True in the last program of a row; it sees what all others have written, by relaxed operations too."""
    tl.debug_barrier()
    last = tl.atomic_add(row_numbers + _ARRIVED, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(row_numbers + _ARRIVED, 0)
    return last


# ---- kernels -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=("temperatures", "top_ks", "top_ps"))
def _likeliest(
    logits, temperatures, top_ks, top_ps, numbers, out, stride, width, part,
    vocab: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the first most likely id of each row, or -1, and the range of scores for the filters."""
    wait_for_inputs(DEPENDENT)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    row_logits, row_numbers = logits + row * stride, numbers + row * width
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, vocab)
    best, smallest = tl.full((block,), 0, tl.int64), tl.full((block,), 0, tl.int64)
    for start in range(begin, end, block):
        ids = start + lane
        values = tl.load(row_logits + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        ranks = _rank(values)
        best = tl.maximum(best, tl.where(ids < end, (ranks << 31) + (2147483647 - ids), 0))
        smallest = tl.maximum(smallest, tl.where(values > float("-inf"), 4294967296 - ranks, 0))
    tl.atomic_max(row_numbers + _BEST, tl.max(best, 0), sem="relaxed")
    tl.atomic_max(row_numbers + _SMALLEST, tl.max(smallest, 0), sem="relaxed")
    if _last_to_arrive(row_numbers):
        best_one = tl.load(row_numbers + _BEST)
        largest = _float(best_one >> 31)
        finite = (largest > float("-inf")) & (largest < float("inf"))
        tl.store(out + row, tl.where(finite, 2147483647 - (best_one & 2147483647), -1))
        if top_ks is not None:
            top_k = tl.load(top_ks + row)
            filters = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_ps + row) < 1.0)
            if finite & filters & (tl.load(temperatures + row) > 0.0):
                temperature = _temperature(temperatures, row)
                high = largest / temperature
                low = _float(4294967296 - tl.load(row_numbers + _SMALLEST)) / temperature
                low = tl.maximum(low, high - _WIDEST)
                tl.store(row_numbers + _LOW, _rank(low))
                tl.store(row_numbers + _HIGH, _rank(high) + 1)  # from which on there is none


@triton.jit(do_not_specialize_on_alignment=("temperatures", "top_ks", "top_ps"))
def _narrow(
    logits, temperatures, top_ks, top_ps, numbers, out, stride, width, part,
    vocab: tl.constexpr, block: tl.constexpr, most_listed: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Narrow the range of each row's threshold, until all scores above its lower end fit into the list."""
    wait_for_inputs(DEPENDENT)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    row_logits, row_numbers = logits + row * stride, numbers + row * width
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, vocab)
    low_rank, high_rank = tl.load(row_numbers + _LOW), tl.load(row_numbers + _HIGH)
    if (high_rank > 0) & (high_rank != _ALL_LISTED):
        low, high = _float(low_rank), _float(high_rank)
        temperature = _temperature(temperatures, row)
        largest = _largest(row_numbers, temperature)
        scale = _BINS / tl.maximum(high - low, 1e-30)
        counts = tl.full((_BINS,), 0, tl.int32)
        above = tl.full((block,), 0, tl.int32)
        mass, mass_above = tl.full((block,), 0, tl.int64), tl.full((block,), 0, tl.int64)
        for start in range(begin, end, block):
            scores = _scores(row_logits, start + lane, end, temperature)
            inside = (scores >= low) & (scores < high)
            bins = tl.where(inside, (scores - low) * scale, 0.0).to(tl.int32)
            counts += tl.histogram(tl.minimum(bins, _BINS - 1), _BINS, mask=inside)
            one = _mass(scores, largest, vocab)
            above += (scores >= high).to(tl.int32)
            mass_above += tl.where(scores >= high, one, 0)
            mass += tl.where(scores >= low, one, 0)
        tl.atomic_add(row_numbers + _COUNTS + tl.arange(0, _BINS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
        tl.atomic_add(row_numbers + _COUNT_ABOVE, tl.sum(above, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(row_numbers + _MASS_ABOVE, tl.sum(mass_above, 0), sem="relaxed")
        tl.atomic_add(row_numbers + _MASS, tl.sum(mass, 0), sem="relaxed")
        if _last_to_arrive(row_numbers):
            top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
            _choose_range(row_numbers, low, high, largest, top_k, top_p, vocab, most_listed)


@triton.jit
def _choose_range(
    row_numbers, low, high, largest, top_k, top_p, vocab: tl.constexpr, most_listed: tl.constexpr
):  # fmt: skip
    """Find the intervals in which the threshold can be, from the number of scores in each, and begin anew with them."""
    bins = tl.arange(0, _BINS)
    counts = tl.load(row_numbers + _COUNTS + bins)
    above, mass_above = tl.load(row_numbers + _COUNT_ABOVE), tl.load(row_numbers + _MASS_ABOVE)
    mass, total = tl.load(row_numbers + _MASS), tl.load(row_numbers + _TOTAL)
    total = tl.where(total > 0, total, mass)  # the first range has all scores that have a mass
    step = (high - low) / _BINS
    slack = step * 0.01 + tl.maximum(tl.abs(low), tl.abs(high)) * 2.0**-21  # more than any error of rounding
    edges = low + bins * step
    by_count = (top_k > 0) & (top_k < vocab)
    # Bounds of the sum in each interval; a count is exact.
    least = tl.where(by_count, counts, counts * _mass(edges - slack, largest, vocab))
    most = tl.where(by_count, counts, counts * (_mass(tl.minimum(edges + step + slack, largest), largest, vocab) + 1))
    top = tl.where(by_count, above, mass_above)
    whole = tl.where(by_count, above + tl.sum(counts, 0), mass)
    # Bounds of the sum from each interval on, summed from above, and as what the intervals below leave.
    least_sums, most_sums = tl.cumsum(least, 0), tl.cumsum(most, 0)
    lower = tl.maximum(top + tl.sum(least, 0) - (least_sums - least), whole - (most_sums - most))
    upper = tl.minimum(top + tl.sum(most, 0) - (most_sums - most), whole - (least_sums - least))
    goal = tl.where(by_count, top_k.to(tl.int64), _share(top_p, total))
    first = tl.max(tl.where(lower >= goal, bins, 0), 0)
    # Fewer tokens than top_k may have a mass: then all of them stay.
    last = tl.min(tl.where((upper < goal) & (whole >= goal), bins, _BINS), 0)
    new_low = tl.where(first > 0, tl.maximum(low + first * step - slack, low), low)
    new_high = tl.where(last < _BINS, tl.minimum(low + last * step + slack, high), high)
    fits = above + tl.sum(tl.where(bins >= first, counts, 0), 0) <= most_listed * 3 // 4  # and some in the slack
    tl.store(row_numbers + _LOW, _rank(new_low))
    tl.store(row_numbers + _HIGH, tl.where(fits, _ALL_LISTED, _rank(new_high)))
    tl.store(row_numbers + _TOTAL, total)
    tl.store(row_numbers + _COUNTS + bins, tl.full((_BINS,), 0, tl.int64))
    tl.store(row_numbers + _COUNT_ABOVE, 0)
    tl.store(row_numbers + _MASS_ABOVE, 0)
    tl.store(row_numbers + _MASS, 0)


@triton.jit
def _share(top_p, total):
    """Return the least mass of the nucleus. The most likely token is in it for every top_p."""
    return tl.maximum(tl.ceil(tl.minimum(top_p, 1.0) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize_on_alignment=("temperatures", "top_ks", "top_ps"))
def _threshold(
    logits, temperatures, top_ks, top_ps, listed, numbers, out, stride, width, part,
    vocab: tl.constexpr, block: tl.constexpr, most_listed: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """List the scores in each row's range and find the thresholds of top_k and top_p among them."""
    wait_for_inputs(DEPENDENT)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    row_logits, row_numbers, row_list = logits + row * stride, numbers + row * width, listed + row * most_listed
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, vocab)
    low_rank, high_rank = tl.load(row_numbers + _LOW), tl.load(row_numbers + _HIGH)
    if high_rank > 0:
        temperature = _temperature(temperatures, row)
        largest = _largest(row_numbers, temperature)
        low = _float(low_rank)
        high = tl.where(high_rank == _ALL_LISTED, float("inf"), _float(high_rank))
        above = tl.full((block,), 0, tl.int32)
        mass_above = tl.full((block,), 0, tl.int64)
        for start in range(begin, end, block):
            scores = _scores(row_logits, start + lane, end, temperature)
            inside = (scores >= low) & (scores < high)
            number = tl.sum(inside.to(tl.int32), 0)
            if number > 0:
                begun = tl.atomic_add(row_numbers + _LENGTH, number.to(tl.int64), sem="relaxed")
                at = begun + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(row_list + at, scores, mask=inside & (at < most_listed))
                ranks = _rank(scores)
                last, first = tl.where(inside, ranks, 0), tl.where(inside, 4294967296 - ranks, 0)
                tl.atomic_max(row_numbers + _LAST_LISTED, tl.max(last, 0), sem="relaxed")
                tl.atomic_max(row_numbers + _FIRST_LISTED, tl.max(first, 0), sem="relaxed")
            one = _mass(scores, largest, vocab)
            above += (scores >= high).to(tl.int32)
            mass_above += tl.where(scores >= high, one, 0)
        tl.atomic_add(row_numbers + _COUNT_ABOVE, tl.sum(above, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(row_numbers + _MASS_ABOVE, tl.sum(mass_above, 0), sem="relaxed")
        if _last_to_arrive(row_numbers):
            _find_thresholds(
                row_logits, row_list, row_numbers, _temperature(temperatures, row), tl.load(top_ks + row),
                tl.load(top_ps + row), vocab, block // 2, most_listed,
            )  # fmt: skip


@triton.jit
def _find_thresholds(
    row_logits, row_list, row_numbers, temperature, top_k, top_p,
    vocab: tl.constexpr, block: tl.constexpr, most_listed: tl.constexpr,
):  # fmt: skip
    """Find the thresholds among the listed scores, or among all of the row."""
    largest, length = _largest(row_numbers, temperature), tl.load(row_numbers + _LENGTH)
    by_count = (top_k > 0) & (top_k < vocab)
    # The nucleus among top_k tokens needs the sum of their exponentials, so all of them.
    from_row = (length > most_listed) | (by_count & (top_p < 1.0) & (tl.load(row_numbers + _HIGH) != _ALL_LISTED))
    size = tl.where(from_row, vocab, length).to(tl.int32)
    low = 4294967296 - tl.load(row_numbers + _FIRST_LISTED)
    high = tl.load(row_numbers + _LAST_LISTED)
    total = tl.load(row_numbers + _TOTAL)
    if by_count:
        above = tl.where(from_row, 0, tl.load(row_numbers + _COUNT_ABOVE))
        goal = top_k.to(tl.int64)
        low = _search(
            row_logits, row_list, from_row, size, temperature, largest, low, high, above, goal, True, vocab, block
        )
        tl.store(row_numbers + _TOP_K, low)
    if top_p < 1.0:
        if by_count:
            high = _rank(largest)
            sums = tl.full((block,), 0, tl.int64)
            for start in range(0, size, block):
                scores = _candidates(row_logits, row_list, from_row, start + tl.arange(0, block), size, temperature)
                sums += tl.where(scores >= _float(low), _mass(scores, largest, vocab), 0)
            total = tl.sum(sums, 0)
        above = tl.where(from_row, 0, tl.load(row_numbers + _MASS_ABOVE))
        goal = _share(top_p, total)
        low = _search(
            row_logits, row_list, from_row, size, temperature, largest, low, high, above, goal, False, vocab, block
        )
        tl.store(row_numbers + _TOP_P, low)


@triton.jit
def _candidates(row_logits, row_list, from_row, at, size, temperature):
    """Return scores of the list, or of the row; -inf from `size` on."""
    given = at < size
    values = tl.load(row_logits + at, mask=given & from_row, other=float("-inf")).to(tl.float32)
    stored = tl.load(row_list + at, mask=given & (from_row == 0), other=float("-inf"))
    return tl.where(from_row, values / temperature, stored)


@triton.jit
def _search(
    row_logits, row_list, from_row, size, temperature, largest, low, high, above, goal,
    by_count: tl.constexpr, vocab: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return the largest rank in [low, high] for which the scores that reach it sum up to the goal, or `low`.

    Scores count 1 or their mass, and `above` is the sum of the scores above the list. Each pass tests eight ranks.
    """
    lane = tl.arange(0, block)
    while low < high:
        distance = (high - low + 7) // 8
        bounds = _float(tl.minimum(low + (tl.arange(0, 8) + 1) * distance, high))
        sums = tl.full((8,), 0, tl.int64) + above
        for start in range(0, size, block):
            scores = _candidates(row_logits, row_list, from_row, start + lane, size, temperature)
            if by_count:
                sums += tl.sum((scores[None, :] >= bounds[:, None]).to(tl.int32), 1).to(tl.int64)
            else:
                masses = _mass(scores, largest, vocab)
                sums += tl.sum(tl.where(scores[None, :] >= bounds[:, None], masses[None, :], 0), 1)
        reached = tl.sum((sums >= goal).to(tl.int64), 0)
        high = tl.where(reached < 8, tl.minimum(low + (reached + 1) * distance, high) - 1, high)
        low = tl.minimum(low + reached * distance, high)
    return low


@triton.jit(do_not_specialize_on_alignment=("temperatures", "min_ps", "uniforms"))
def _draw(
    logits, temperatures, min_ps, uniforms, numbers, out, stride, width, part,
    vocab: tl.constexpr, block: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the first token at which the running sum of what the filters leave exceeds its share."""
    wait_for_inputs(DEPENDENT)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    row_logits, row_numbers = logits + row * stride, numbers + row * width
    begin = tl.program_id(1) * part
    best = tl.load(row_numbers + _BEST) >> 31
    finite = (_float(best) > float("-inf")) & (_float(best) < float("inf"))
    if finite & (tl.load(temperatures + row) > 0.0):
        temperature = _temperature(temperatures, row)
        largest = _largest(row_numbers, temperature)
        top_k, top_p = tl.load(row_numbers + _TOP_K), tl.load(row_numbers + _TOP_P)
        least_score = tl.where(top_k > 0, _float(top_k), float("-inf"))
        least = tl.maximum(tl.where(top_p > 0, tl.exp(_float(top_p) - largest), 0.0), tl.load(min_ps + row))
        sums = tl.full((block,), 0, tl.int64)
        for start in range(begin, tl.minimum(begin + part, vocab), block):
            sums += _kept(row_logits, start + lane, temperature, largest, least_score, least, vocab)
        tl.store(row_numbers + _COUNTS + tl.program_id(1), tl.sum(sums, 0))
        if _last_to_arrive(row_numbers):
            parts = tl.arange(0, _BINS)
            masses = tl.load(row_numbers + _COUNTS + parts, mask=parts < tl.num_programs(1), other=0)
            running = tl.cumsum(masses, 0)
            total = tl.sum(masses, 0)
            target = tl.minimum((tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64), total - 1)
            passed = running <= target
            before = tl.max(tl.where(passed, running, 0), 0)
            first = tl.sum(passed.to(tl.int32), 0) * part
            token = tl.full((), vocab, tl.int32)
            for start in range(first, tl.minimum(first + part, vocab), block):
                ids = start + lane
                kept = _kept(row_logits, ids, temperature, largest, least_score, least, vocab)
                token = tl.minimum(token, tl.min(tl.where(before + tl.cumsum(kept, 0) > target, ids, vocab), 0))
                before += tl.sum(kept, 0)
            tl.store(out + row, token.to(tl.int64))


@triton.jit
def _kept(row_logits, ids, temperature, largest, least_score, least, vocab: tl.constexpr):
    """Return the masses of tokens, 0 for those that a filter removes."""
    scores = _scores(row_logits, ids, vocab, temperature)
    kept = (scores >= least_score) & (tl.exp(scores - largest) >= least)
    return tl.where(kept, _mass(scores, largest, vocab), 0)
