"""Picks from each row's best logits alone, where that is enough: greedy sequences, and those that draw from a few of the likeliest.

Whatever needs more of a row (penalties, beams, no limit on what may be drawn) is the sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from app.engine.batch import Picked
from app.engine.sampling_rows import draw, has_penalties, probabilities, require_finite
from app.engine.sequence import Sequence
from app.engine.uniform import uniform
from app.kernels.best import MOST_BEST, Best, Wanted


def wanted_best(sequences: Rows[Sequence]) -> Wanted | None:
    """How many of the best logits are enough for all of these; None where one of them needs more."""
    most, logsumexp = 0, False
    for sequence in sequences:
        enough = _enough(sequence)
        if enough is None:
            return None
        most, logsumexp = max(most, enough), logsumexp or sequence.params.logprobs is not None
    return Wanted(most, logsumexp) if most else None


def _enough(sequence: Sequence) -> int | None:
    params = sequence.params
    if sequence.is_beam or has_penalties(params):
        return None
    kept = 1 if params.greedy else params.top_k
    wanted = max(kept, params.logprobs or 0)
    return wanted if kept > 0 and wanted <= MOST_BEST else None


def pick_best(best: Best, sequences: Rows[Sequence]) -> list[Picked]:
    """One `Picked` a sequence, as the sampler would pick from whole rows. Raises `StepFailed` where the logits are not finite.

    Of tokens that tie for the last of `top_k` places the one with the lower id is kept; from whole rows all of them are.
    """
    require_finite(best.values[:, 0])
    ids, drawn = best.ids.tolist(), [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    places = [0] * len(sequences)
    if drawn:
        for row, place in zip(drawn, _draw(best, [sequences[row] for row in drawn], drawn), strict=True):
            places[row] = place
    return [
        _with_logprobs(Picked((ids[row][place],)), best, row, place, sequence)
        for row, (place, sequence) in enumerate(zip(places, sequences, strict=True))
    ]


def _draw(best: Best, sequences: Rows[Sequence], rows: list[int]) -> list[int]:
    """Which of its best each of these rows draws. In the order of the vocabulary, as from whole rows."""
    order = best.ids[rows].argsort(-1)
    scores = best.values[rows]
    for row, sequence in enumerate(sequences):
        scores[row, sequence.params.top_k :] = -torch.inf
    shares = probabilities(scores.gather(-1, order), [sequence.params for sequence in sequences])
    uniforms = [uniform(sequence.seed, len(sequence.token_ids)) for sequence in sequences]
    chosen: Tensor = order.gather(-1, draw(shares, uniforms).unsqueeze(-1)).squeeze(-1)
    return [int(place) for place in chosen.tolist()]


def _with_logprobs(picked: Picked, best: Best, row: int, place: int, sequence: Sequence) -> Picked:
    count = sequence.params.logprobs
    if count is None:
        return picked
    assert best.logsumexp is not None, "it was asked for"
    logprobs = (best.values[row] - best.logsumexp[row]).tolist()
    top = tuple(zip(best.ids[row, :count].tolist(), logprobs[:count], strict=True))
    return Picked(picked.token_ids, (logprobs[place],), top)
