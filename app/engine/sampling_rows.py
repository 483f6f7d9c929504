"""The mathematics of picking: many rows of logits at once, each with its own parameters. Which row needs what is the sampler's business.

Every filter is a threshold: a token stays if it is at least as likely as the last one that must stay, so ties stay together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.sequence import Sequence
from app.errors import StepFailed
from app.messages import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-53
_BLOCK = 256  # tokens whose probabilities are summed before one of them is drawn: a running sum over the blocks is short
LEAST_TEMPERATURE = (
    1e-6  # smaller ones, and smaller repetition penalties, act like it: an overflow would look like a broken model
)
_NUCLEUS_WIDTHS = (
    256,
    4096,
)  # most nuclei are found among this many likeliest tokens; sorting a whole vocabulary costs 30 times as much


def take(values: Tensor, rows: list[int] | Tensor) -> Tensor:
    """Some rows of values [rows, vocab], in ascending order; all of them are not copied."""
    return values if len(rows) == len(values) else values[rows]


def require_finite(best: Tensor) -> None:
    """best [rows] is each row's largest logit: NaN anywhere in a row, +inf or nothing but -inf shows there."""
    if not bool(best.isfinite().all()):
        bad = int((~best.isfinite()).sum())
        raise StepFailed(
            f"The model's logits are not finite for {bad} of {len(best)} sequences of this step, so no token can be picked."
        )


def penalised(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """A float32 copy of logits [rows, vocab] with each sequence's penalties.

    Repetition counts prompt and completion, as in transformers; presence and frequency the completion alone, as OpenAI has it.
    Counted anew each step, for the rows that ask: a preempted or forked sequence needs no bookkeeping.
    """
    scores = logits.to(torch.float32, copy=True)
    for row, sequence in enumerate(sequences):
        if sequence.params.has_penalties:
            _penalise(scores[row], sequence)
    return scores


def _penalise(scores: Tensor, sequence: Sequence) -> None:
    params, num_prompt = sequence.params, sequence.num_prompt_tokens
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(sequence.token_ids)), device=scores.device)
        values, penalty = scores[seen], max(params.repetition_penalty, LEAST_TEMPERATURE)
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.num_completion_tokens and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(sequence.token_ids[num_prompt:])
        said, times = torch.tensor([list(counts.keys()), list(counts.values())], device=scores.device)
        scores[said] -= times * params.frequency_penalty + params.presence_penalty


def probabilities(scores: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """What may be drawn, from scores [rows, vocab] float32, which are overwritten: temperature, top_k, top_p, min_p, in that order.

    Filtered tokens have probability 0; what is left need not sum to 1.
    """
    scores.div_(_column([max(one.temperature, LEAST_TEMPERATURE) for one in params], scores))
    vocab_size = scores.shape[1]
    if any(0 < one.top_k < vocab_size for one in params):
        scores.masked_fill_(scores < _top_k_threshold(scores, [one.top_k for one in params]), -torch.inf)
    shares = torch.softmax(scores, -1, out=scores)  # in place: touching fresh memory costs more than the arithmetic
    if any(one.top_p < 1.0 or one.min_p > 0.0 for one in params):
        threshold = _column([one.min_p for one in params], shares) * shares.amax(-1, keepdim=True)
        threshold = torch.maximum(threshold, _top_p_threshold(shares, [one.top_p for one in params]))
        shares.masked_fill_(shares < threshold, 0.0)
    return shares


def _column(values: list[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, 1], where the rows are."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def draw(shares: Tensor, uniforms: Rows[float]) -> Tensor:
    """One token id a row from probabilities [rows, vocab]: where the running sum in vocabulary order passes the row's uniform number."""
    return draw_at(shares, torch.tensor(uniforms, dtype=torch.float64, device=shares.device))


def draw_at(shares: Tensor, uniforms: Tensor) -> Tensor:
    """The same by uniform numbers [rows] float64 that lie where the probabilities do. Nothing waits for a device.

    In vocabulary order and not by rank, since then a rounding difference in the logits moves the borders a little instead of
    swapping two tokens. In two stages, blocks and then inside one, since a running sum over a vocabulary in float64 is slow.
    """
    missing = -shares.shape[1] % _BLOCK
    blocks = (F.pad(shares, (0, missing)) if missing else shares).view(len(shares), -1, _BLOCK)
    block, rest = _locate(blocks.sum(-1).double(), uniforms)
    chosen = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, _BLOCK)).squeeze(1)
    inside, _ = _locate(chosen.double(), rest)
    return block * _BLOCK + inside


def _locate(mass: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds `fraction` [rows] of the row's total, and how far into that index's mass it falls."""
    running = mass.cumsum(-1)
    target = fraction * running[:, -1]
    index = (running <= target.unsqueeze(1)).sum(-1, keepdim=True)  # below the last: target < total, as fraction < 1
    here = mass.gather(1, index).squeeze(1)  # greater than 0: the sum grew here
    before = running.gather(1, index).squeeze(1) - here
    return index.squeeze(1), ((target - before) / here).clamp_(0.0, _BELOW_ONE)


def _top_k_threshold(scores: Tensor, top_k: Rows[int]) -> Tensor:
    """The k-th largest score of each row, [rows, 1]; -inf where k is off."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < scores.shape[1]]
    counts = [top_k[row] for row in rows]
    best = take(scores, rows).topk(max(counts)).values
    threshold = scores.new_full((len(scores), 1), -torch.inf)
    threshold[rows] = best.gather(1, _column([k - 1 for k in counts], scores, torch.int64))
    return threshold


def _top_p_threshold(shares: Tensor, top_p: Rows[float]) -> Tensor:
    """The least probability inside each row's nucleus, [rows, 1]: the fewest likeliest tokens that sum to at least top_p. 0 where off."""
    threshold = shares.new_zeros((len(shares), 1))
    pending = torch.tensor([row for row, p in enumerate(top_p) if p < 1.0], dtype=torch.int64, device=shares.device)
    limits = _column(list(top_p), shares, torch.float64)
    vocab_size = shares.shape[1]
    for width in (*(width for width in _NUCLEUS_WIDTHS if width < vocab_size), vocab_size):
        if len(pending) == 0:
            break
        best = take(shares, pending).topk(width).values
        running = best.double().cumsum(-1)
        inside = (running - best < limits[pending]).sum(-1, keepdim=True).clamp_(min=1)
        threshold[pending] = best.gather(1, inside - 1)
        pending = pending[running[:, -1] < limits[pending].squeeze(1)]  # these want tokens beyond `width`
    return threshold
