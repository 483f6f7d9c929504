"""Sampler: each sequence's next token, or a beam's best candidates, from one step's logits.

Rows are grouped by their sampling method. The scheduler decides where a sequence ends and which beams continue.
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
    """A stateless sampler.

    The result depends only on the logits and the sequence, so neither the batch nor a preemption changes it.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def pick(self, logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
        """Return one `SampledTokens` per row of logits [rows, vocab].

        Raises:
            StepFailed: The logits are not finite.
        """
        expected = (len(rows), self.vocab_size)
        assert logits.shape == expected, f"one row of logits for each row to sample: got {tuple(logits.shape)}, not {expected}"
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
    """Sample greedily in one pass over the logits, without converting them.

    `max` takes the lowest id among equals, and is faster than `argmax` in bfloat16.
    """
    best, token_ids = logits.max(-1)
    require_finite(best)
    return [Picked((token_id,)) for token_id in token_ids.tolist()]


def _pick_greedy_penalised(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    require_finite(logits.amax(-1))
    return _pick_greedy(penalised(logits, [row.sequence for row in rows]), rows)


def _pick_drawn(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """Sample randomly. The random number depends on the seed and on the position of the new token."""
    require_finite(logits.amax(-1))
    scores = penalised(logits, [row.sequence for row in rows])
    shares = probabilities(scores, [row.sequence.params for row in rows])
    uniforms = [uniform(row.sequence.seed, row.position) for row in rows]
    return [Picked((token_id,)) for token_id in draw(shares, uniforms).tolist()]


def _pick_beams(logits: Tensor, rows: Rows[RowToPick]) -> list[Picked]:
    """Return each parent's best candidates with log-probabilities, best first.

    A beam search ignores the temperature.
    """
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
    """Add log-probabilities to the rows that requested them.

    They are natural logarithms under the model's distribution before penalties and temperature.
    """
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
        own = one.logprobs or (owns[place],)  # a beam already has those of its candidates
        result[index] = replace(one, logprobs=own, top=top)
    return result


def _log_softmax(scores: Tensor) -> Tensor:
    """Return the log-softmax, computed in place: writing new memory of this size costs more than the arithmetic."""
    return torch.log_softmax(scores, -1, out=scores)


def _best(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return each row's `count` most likely tokens with log-probabilities, best first.

    Among equals, the lower id comes first.
    """
    values, token_ids = logprobs.topk(min(count, logprobs.shape[1]))
    pairs = (zip(ids, row, strict=True) for ids, row in zip(token_ids.tolist(), values.tolist(), strict=True))
    return [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in pairs]
