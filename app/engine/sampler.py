"""Picks each sequence's next token, or a beam's best candidates, from one step's logits; rows are grouped by what they ask for.

The mathematics is in `sampling_rows.py`. Where a sequence ends, and which beams live on, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch
from torch import Tensor

from app.engine.batch import Picked, RowToPick
from app.engine.sampling_rows import draw, penalised, probabilities, require_finite, take
from app.engine.sequence import Sequence
from app.engine.uniform import uniform

PickRows = Callable[[Tensor, Rows[RowToPick]], list[Picked]]


class Sampler:
    """Stateless: what is picked follows from the logits and the sequence alone, so neither the batch nor a preemption matters."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def pick(self, logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
        """One `Picked` a row of logits [rows, vocab]. Raises `StepFailed` where they are not finite."""
        expected = (len(rows), self.vocab_size)
        assert logits.shape == expected, f"one row of logits for each to pick: got {tuple(logits.shape)}, not {expected}"
        groups: dict[PickRows, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(_way_to_pick(row.sequence), []).append(index)
        picked: list[Picked] = [Picked(())] * len(rows)
        for pick_rows, indices in groups.items():
            chosen = pick_rows(take(logits, indices), [rows[index] for index in indices])
            for index, one in zip(indices, chosen, strict=True):
                picked[index] = one
        return _with_logprobs(picked, logits, rows)


def _way_to_pick(sequence: Sequence) -> PickRows:
    if sequence.is_beam:
        return _pick_beams
    if not sequence.params.greedy:
        return _pick_drawn
    return _pick_greedy_penalised if sequence.params.has_penalties else _pick_greedy


def _pick_greedy(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """One pass over the logits as they are. `max` takes the lowest id among equals, and is quicker than `argmax` in bfloat16."""
    best, token_ids = logits.max(-1)
    require_finite(best)
    return [Picked((token_id,)) for token_id in token_ids.tolist()]


def _pick_greedy_penalised(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    require_finite(logits.amax(-1))
    return _pick_greedy(penalised(logits, [row.sequence for row in rows]), rows)


def _pick_drawn(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """The number drawn belongs to the seed and to the position that the new token will have."""
    require_finite(logits.amax(-1))
    scores = penalised(logits, [row.sequence for row in rows])
    shares = probabilities(scores, [row.sequence.params for row in rows])
    uniforms = [uniform(row.sequence.seed, row.position) for row in rows]
    return [Picked((token_id,)) for token_id in draw(shares, uniforms).tolist()]


def _pick_beams(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """Each parent's best candidates with their log-probabilities, best first. A beam search ignores the temperature."""
    require_finite(logits.amax(-1))
    sequences = [row.sequence for row in rows]
    logprobs = _log_softmax(penalised(logits, sequences))
    best = _best(logprobs, max(sequence.num_candidates for sequence in sequences))
    picked = []
    for row, sequence in zip(best, sequences, strict=True):
        candidates = row[: sequence.num_candidates]
        picked.append(Picked(tuple(one for one, _ in candidates), tuple(logprob for _, logprob in candidates)))
    return picked


def _with_logprobs(picked: list[Picked], logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """Adds natural-log probabilities under the model's own distribution, before penalties and temperature, where they were asked for."""
    asked = [index for index, row in enumerate(rows) if row.sequence.params.logprobs is not None]
    if not asked:
        return picked
    logprobs = _log_softmax(take(logits, asked).to(torch.float32, copy=True))
    best = _best(logprobs, max(rows[index].sequence.params.logprobs or 0 for index in asked))
    chosen = torch.tensor([picked[index].token_ids[:1] for index in asked], device=logprobs.device)
    owns = logprobs.gather(1, chosen).squeeze(1).tolist()
    result = list(picked)
    for place, index in enumerate(asked):
        one, top = picked[index], tuple(best[place][: rows[index].sequence.params.logprobs])
        own = one.logprobs or (owns[place],)  # a beam has its candidates' already
        result[index] = replace(one, logprobs=own, top=top)
    return result


def _log_softmax(scores: Tensor) -> Tensor:
    """In place: touching fresh memory of this size costs more than the arithmetic."""
    return torch.log_softmax(scores, -1, out=scores)


def _best(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Each row's `count` likeliest tokens with their log-probabilities, best first, the lower id first among equals."""
    values, token_ids = logprobs.topk(min(count, logprobs.shape[1]))
    pairs = (zip(ids, row, strict=True) for ids, row in zip(token_ids.tolist(), values.tolist(), strict=True))
    return [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in pairs]
