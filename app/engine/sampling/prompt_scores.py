"""Scores of a prompt's tokens: log-probability, rank and the most likely tokens at each position.

The logits of all positions of a long prompt would need gigabytes, so they are computed for a few positions at a time
from the hidden states of the step, and only the scores are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from app.engine.sampling.rows import rows_not_finite
from app.engine.scheduler.batch import Batch, ScoredSpan
from app.messages import TokenScore

# Rows whose logits exist at once: with a vocabulary of 150,000 tokens 39 MB in FP32, twice for the time of a step. So
# many rows read the output layer's weights often enough for their product to be bound by arithmetic.
MAX_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The scores of some rows as tensors, which may be on a device: all [rows], `top_*` [rows, most likely tokens].

    `best` is the largest logit, from which rows that are not finite are found.
    """

    logprobs: Tensor
    ranks: Tensor
    best: Tensor
    top_logprobs: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class SpanScores:
    """The rows of one `ScoredSpan`, in order."""

    scored: ScoredSpan
    rows: tuple[ScoredRows, ...]

    def on_host(self) -> tuple[TokenScore, ...]:
        """Return the scores as plain values; none if the logits are not finite. On a device this waits for them."""
        if any(rows_not_finite(rows.best) for rows in self.rows):
            return ()
        target_ids = iter(self.scored.target_ids)
        return tuple(score for rows in self.rows for score in _token_scores(rows, target_ids))


def score_prompts(batch: Batch, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[SpanScores]:
    """Return the scores of each of `batch.scored`, on the device of `hidden`.

    Args:
        batch: The batch of the step.
        hidden: Hidden states [tokens, size] of all tokens of the step.
        logits: Returns the logits [rows, vocab] of some rows of hidden states.
    """
    first_rows: dict[int, int] = {}
    row = 0
    for span in batch.spans:
        first_rows[id(span)] = row
        row += span.num_tokens
    found: list[SpanScores] = []
    for scored in batch.scored:
        first = first_rows[id(scored.span)] + scored.start - scored.span.start
        target_ids = torch.tensor(scored.target_ids, device=hidden.device)
        rows = hidden[first : first + len(target_ids)]
        starts = range(0, len(rows), MAX_SCORED_ROWS)
        parts = [slice(start, start + MAX_SCORED_ROWS) for start in starts]
        scores = [score_rows(logits(rows[part]), target_ids[part], scored.num_top) for part in parts]
        found.append(SpanScores(scored, tuple(scores)))
    return found


def score_rows(logits: Tensor, target_ids: Tensor, num_top: int) -> ScoredRows:
    """Return the scores of target_ids int64 [rows] under logits [rows, vocab].

    A token's rank is 1 plus the number of tokens that are more likely. Among equals in the top, the lower id is first.
    """
    scores = logits.to(torch.float32, copy=True)
    own = scores.gather(1, target_ids.unsqueeze(1))
    ranks = (scores > own).sum(-1) + 1
    best = scores.amax(-1)
    logprobs = torch.log_softmax(scores, -1, out=scores)
    top_logprobs, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]))
    return ScoredRows(logprobs.gather(1, target_ids.unsqueeze(1)).squeeze(1), ranks, best, top_logprobs, top_ids)


def _token_scores(rows: ScoredRows, target_ids: Iterator[int]) -> Iterator[TokenScore]:
    values = (rows.logprobs.tolist(), rows.ranks.tolist(), rows.top_ids.tolist(), rows.top_logprobs.tolist())
    ids = list(islice(target_ids, len(rows.best)))
    for token_id, logprob, rank, top_ids, top_logprobs in zip(ids, *values, strict=True):
        top = sorted(zip(top_ids, top_logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
        yield TokenScore(token_id, logprob, rank, tuple(top))
