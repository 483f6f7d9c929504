"""Sampling from each row's top logits alone, for greedy sequences and those that sample from a small top_k.

The sampler handles requests that need full logits: penalties, beams, and random sampling without a limit.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from math import isfinite

import torch
from torch import Tensor

from app.engine.batch import Picked, RowToPick
from app.engine.sampling_rows import draw, probabilities, require_finite
from app.engine.sequence import Sequence
from app.engine.uniform import uniform
from app.kernels.best import MOST_BEST, Best, Wanted


def wanted_best(rows: Rows[RowToPick]) -> Wanted | None:
    """Return the number of top logits that is sufficient for all of these rows; None if a row needs full logits."""
    most, logsumexp = 0, False
    for row in rows:
        enough = _enough(row.sequence)
        if enough is None:
            return None
        most, logsumexp = max(most, enough), logsumexp or row.sequence.params.logprobs is not None
    return Wanted(most, logsumexp) if most else None


def _enough(sequence: Sequence) -> int | None:
    params = sequence.params
    if sequence.is_beam or params.has_penalties:
        return None
    kept = 1 if params.greedy else params.top_k
    wanted = max(kept, params.logprobs or 0)
    return wanted if kept > 0 and wanted <= MOST_BEST else None


def pick_best(best: Best, rows: Rows[RowToPick]) -> list[Picked]:
    """Sample one token per row, with the same result as the sampler has for full rows.

    If several tokens tie for the last of the `top_k` places, only the one with the lower id is kept. From full
    rows, all of them are kept.

    Raises:
        StepFailed: The logits are not finite.
    """
    values, ids = best.values.tolist(), best.ids.tolist()
    if not all(isfinite(row[0]) for row in values):
        require_finite(best.values[:, 0])
    drawn = [index for index, row in enumerate(rows) if not row.sequence.params.greedy]
    places = [0] * len(rows)
    if drawn:
        for index, place in zip(drawn, _draw(best, [rows[index] for index in drawn], drawn), strict=True):
            places[index] = place
    logprobs = None if best.logsumexp is None else (best.values - best.logsumexp.unsqueeze(1)).tolist()
    return [
        _told(ids[index], None if logprobs is None else logprobs[index], place, row.sequence)
        for index, (place, row) in enumerate(zip(places, rows, strict=True))
    ]


def _draw(best: Best, rows: Rows[RowToPick], indices: list[int]) -> list[int]:
    """Return, for each row, the index of the sampled token among its top logits.

    Sampling is in vocabulary order, as it is for full rows.
    """
    order = best.ids[indices].argsort(-1)
    scores = best.values[indices]
    for index, row in enumerate(rows):
        scores[index, row.sequence.params.top_k :] = -torch.inf
    shares = probabilities(scores.gather(-1, order), [row.sequence.params for row in rows])
    uniforms = [uniform(row.sequence.seed, row.position) for row in rows]
    chosen: Tensor = order.gather(-1, draw(shares, uniforms).unsqueeze(-1)).squeeze(-1)
    return [int(place) for place in chosen.tolist()]


def _told(ids: list[int], logprobs: list[float] | None, place: int, sequence: Sequence) -> Picked:
    """Return the token at `place` of a row's top logits, with log-probabilities if they were requested."""
    count = sequence.params.logprobs
    if count is None:
        return Picked((ids[place],))
    assert logprobs is not None, "log-probabilities were requested"
    return Picked((ids[place],), (logprobs[place],), tuple(zip(ids[:count], logprobs[:count], strict=True)))
