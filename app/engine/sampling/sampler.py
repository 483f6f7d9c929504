"""Sampler: each sequence's next token, or a beam's best candidates, from one step's logits.

Rows are grouped by their sampling method: greedy sequences and a small top_k need only each row's top logits;
penalties, beams and random sampling without a limit need all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.sampling.rows import (
    apply_penalties,
    filtered_probabilities,
    multinomial,
    rows_not_finite,
    sample_greedy,
    select_rows,
    uniform_number,
)
from app.engine.scheduler.batch import NOT_SAMPLED, Batch, LogitRow, SampledTokens, ScheduledSpan, ScoredSpan, Sequence
from app.messages import TokenScore
from armature_kernels.elementwise.activations import MAX_TOP_LOGITS, RowMasks, TopLogits, TopLogitsRequest, mask_logits

SampleRows = Callable[[Tensor, Rows[LogitRow]], list[SampledTokens]]
# Rows whose logits exist at once: with a vocabulary of 150,000 tokens 39 MB in FP32, twice for the time of a step. So
# many rows read the output layer's weights often enough for their product to be bound by arithmetic.
MAX_SCORED_ROWS = 64
_MIN_ROWS = 16
_MAX_KEPT_LISTS = 16  # lists of allowed tokens whose masks are kept
Words = NDArray[Any]  # uint32: bit t % 32 of word t // 32 is token t


def _zeros(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.int64)


class TokenMasks:
    """The masks of one step's rows, `words` int32 [rows, ceil(vocab / 32)], at a fixed address until rows exceed it."""

    __slots__ = ("_array", "_vocab_size", "words")

    def __init__(self, vocab_size: int, rows: int = _MIN_ROWS, allocate: Callable[[int], Tensor] = _zeros) -> None:
        """Allocate the masks; `allocate` returns int64 memory of so many elements."""
        self._vocab_size, row_words = vocab_size, -(-vocab_size // 32)
        memory = allocate(-(-rows * row_words // 2))
        self.words = memory.view(torch.int32)[: rows * row_words].view(rows, row_words)
        self._array: Words = self.words.numpy().view(numpy.uint32)

    def with_room(self, rows: int, allocate: Callable[[int], Tensor]) -> TokenMasks:
        """Return masks of at least so many rows, in memory that `allocate` returned if these are too few."""
        if rows <= len(self._array):
            return self
        return TokenMasks(self._vocab_size, max(rows, 2 * len(self._array)), allocate)

    def for_step(self, spans: Iterable[ScheduledSpan], num_rows: int) -> TokenMasks | None:
        """Return the masks of a step's rows, in order, maybe in a larger object; None if no row is restricted."""
        sampling = [span for span in spans if span.samples]
        if not any(span.sequence.restricts_tokens for span in sampling):
            return None
        masks = self.with_room(num_rows, _zeros)
        first = 0
        for span in sampling:
            rows = masks._array[first : first + span.num_samples]
            _fill(rows, span, self._vocab_size)
            first += span.num_samples
        return masks

    def allowed(self, num_rows: int) -> Tensor:
        bits = numpy.unpackbits(self._array[:num_rows].view(numpy.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocab_size]).bool()


def _fill(rows: Words, span: ScheduledSpan, vocab_size: int) -> None:
    sequence, params = span.sequence, span.sequence.params
    if sequence.grammar is None:
        rows[:] = 0xFFFFFFFF
    else:
        sequence.grammar.fill_masks(rows.ctypes.data, rows.strides[0], span.draft_ids)
    if params.allowed_token_ids is not None:
        rows &= _mask_of(params.allowed_token_ids, vocab_size)
    for place in range(span.num_samples):
        known = span.known_end + place
        if known - sequence.num_prompt_tokens < params.min_tokens:
            _clear(rows[place], sequence.stop_ids)
        if sequence.bad_word_ids:
            _clear(rows[place], _forbidden_ids(sequence, span.draft_ids[:place]))
        if sequence.thinking is not None and sequence.thinking.is_near:
            _force(rows[place], sequence.thinking.after(span.draft_ids[:place]).forced_id)
        if not rows[place].any():
            _allow_end(rows[place], sequence)


def _force(row: Words, token_id: int | None) -> None:
    """Allow this token alone, unless it is None or another rule forbids it."""
    if token_id is not None and row[token_id >> 5] >> numpy.uint32(token_id & 31) & numpy.uint32(1):
        row[:] = 0
        row[token_id >> 5] = numpy.uint32(1 << (token_id & 31))


def _forbidden_ids(sequence: Sequence, draft_ids: tuple[int, ...]) -> set[int]:
    longest = max(map(len, sequence.bad_word_ids)) - 1
    start = max(sequence.num_prompt_tokens, len(sequence.token_ids) - longest)
    recent = (*sequence.token_ids[start:], *draft_ids)
    return {
        word[-1]
        for word in sequence.bad_word_ids
        if len(word) == 1 or (len(recent) >= len(word) - 1 and recent[1 - len(word) :] == word[:-1])
    }


def _clear(row: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if token_id >> 5 < len(row):
            row[token_id >> 5] &= ~numpy.uint32(1 << (token_id & 31))


def _allow_end(row: Words, sequence: Sequence) -> None:
    """Allow the end tokens, or any token if there are none, where the rules together allow no token."""
    if not sequence.stop_ids:
        row[:] = 0xFFFFFFFF
    for token_id in sequence.stop_ids:
        if token_id >> 5 < len(row):
            row[token_id >> 5] |= numpy.uint32(1 << (token_id & 31))


@lru_cache(_MAX_KEPT_LISTS)
def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> Words:
    bits = numpy.zeros(-(-vocab_size // 32) * 32, numpy.uint8)
    bits[list(token_ids)] = 1
    words: Words = numpy.packbits(bits, bitorder="little").view(numpy.uint32)
    return words


class Sampler:
    """A stateless sampler: neither the batch nor a preemption changes a sampled token."""

    def __init__(self, vocab_size: int, candidates: SampleRows | None = None) -> None:
        self.vocab_size = vocab_size
        self._beam_candidates = candidates or beam_candidates

    def sample(
        self, logits: Tensor, rows: Rows[LogitRow], masks: RowMasks | None = None, reported: Tensor | None = None
    ) -> list[SampledTokens]:
        """Return the samples of each row of logits [rows, vocab], of the tokens that `masks` allow.

        A row whose logits are not finite gets `NOT_SAMPLED`; the others do not depend on it. Log-probabilities are those
        of `reported`, if given, else of the logits.
        """
        expected = (len(rows), self.vocab_size)
        assert logits.shape == expected, (
            f"one row of logits for each row to sample: got {tuple(logits.shape)}, not {expected}"
        )
        groups: dict[SampleRows, list[int]] = {}
        for index, row in enumerate(rows):
            sample_rows = self._beam_candidates if row.sequence.is_beam else _sampling_function(row.sequence)
            groups.setdefault(sample_rows, []).append(index)
        if (
            masks is None
            and groups.keys() == {_sample_greedy}
            and all(row.sequence.params.logprobs is None for row in rows)
        ):
            return _sample_greedy(logits, rows)  # in one pass over the logits
        scores = logits if masks is None else mask_logits(logits, masks)
        bad = rows_not_finite(logits.amax(-1), *(() if masks is None else (scores.amax(-1),)))
        if bad:
            logits, scores = (
                values.index_fill(0, torch.tensor(bad, device=values.device), 0.0) for values in (logits, scores)
            )
        samples: list[SampledTokens] = [NOT_SAMPLED] * len(rows)
        for sample_rows, indices in groups.items():
            chosen = sample_rows(select_rows(scores, indices), [rows[index] for index in indices])
            for index, one in zip(indices, chosen, strict=True):
                samples[index] = one
        samples = _with_logprobs(samples, logits if reported is None else reported, rows)
        for index in bad:
            samples[index] = NOT_SAMPLED
        return samples


def _sampling_function(sequence: Sequence) -> SampleRows:
    if not sequence.params.greedy:
        return _sample_random
    return _sample_greedy_penalised if sequence.params.changes_scores else _sample_greedy


def _sample_greedy(logits: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    return [SampledTokens((token_id,)) for token_id in sample_greedy(logits).tolist()]


def _sample_greedy_penalised(logits: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    return _sample_greedy(apply_penalties(logits, [row.sequence for row in rows]), rows)


def _sample_random(logits: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    scores = apply_penalties(logits, [row.sequence for row in rows])
    probs = filtered_probabilities(scores, [row.sequence.params for row in rows])
    uniforms = [uniform_number(row.sequence.seed, row.position) for row in rows]
    return [SampledTokens((token_id,)) for token_id in multinomial(probs, uniforms).tolist()]


def beam_candidates(logits: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    """Return each parent's best candidates with log-probabilities, best first, without a temperature."""
    return _top_candidates(_log_softmax(apply_penalties(logits, [row.sequence for row in rows])), rows)


def normalized_candidates(logprobs: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    """Return the same of log-probabilities [rows, vocab], which penalties change, as in transformers."""
    return _top_candidates(apply_penalties(logprobs, [row.sequence for row in rows]), rows)


def _top_candidates(logprobs: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    sequences = [row.sequence for row in rows]
    best = _top_tokens(logprobs, max(sequence.num_candidates for sequence in sequences))
    samples = []
    for row, sequence in zip(best, sequences, strict=True):
        candidates = row[: sequence.num_candidates]
        samples.append(SampledTokens(tuple(one for one, _ in candidates), tuple(logprob for _, logprob in candidates)))
    return samples


def _with_logprobs(samples: list[SampledTokens], logits: Tensor, rows: Rows[LogitRow]) -> list[SampledTokens]:
    """Add natural log-probabilities, before penalties and temperature, to the rows that requested them."""
    requested = [index for index, row in enumerate(rows) if row.sequence.params.logprobs is not None]
    if not requested:
        return samples
    logprobs = _log_softmax(select_rows(logits, requested).to(torch.float32, copy=True))
    best = _top_tokens(logprobs, max(rows[index].sequence.params.logprobs or 0 for index in requested))
    chosen = torch.tensor([samples[index].token_ids[:1] for index in requested], device=logprobs.device)
    own_logprobs = logprobs.gather(1, chosen).squeeze(1).tolist()
    result = list(samples)
    for place, index in enumerate(requested):
        one, params = samples[index], rows[index].sequence.params
        top = tuple(best[place][: params.logprobs])
        if params.logprob_token_ids:
            top = _chosen_tokens(logprobs[place], {*params.logprob_token_ids, *one.token_ids[:1]})
        own = one.logprobs or (own_logprobs[place],)  # a beam already has those of its candidates
        result[index] = replace(one, logprobs=own, top=top)
    return result


def _chosen_tokens(logprobs: Tensor, token_ids: Set[int]) -> tuple[tuple[int, float], ...]:
    ids = sorted(token_ids)
    return tuple(sorted(zip(ids, logprobs[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0])))


def _log_softmax(scores: Tensor) -> Tensor:
    """Return the log-softmax, computed in place: writing new memory of this size costs more than the arithmetic."""
    return torch.log_softmax(scores, -1, out=scores)


def _top_tokens(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return each row's `count` most likely tokens with log-probabilities, best first, then the lower id."""
    values, token_ids = logprobs.topk(min(count, logprobs.shape[1]))
    pairs = (zip(ids, row, strict=True) for ids, row in zip(token_ids.tolist(), values.tolist(), strict=True))
    return [sorted(row, key=lambda pair: (-pair[1], pair[0])) for row in pairs]


def top_logits_request(rows: Rows[LogitRow], masks: RowMasks | None = None) -> TopLogitsRequest | None:
    """Return the top logits that suffice for all of these rows, whose masks are `masks`; None: all logits."""
    max_count, logsumexp = 0, False
    for row in rows:
        enough = _sufficient_count(row.sequence)
        if enough is None:
            return None
        max_count, logsumexp = max(max_count, enough), logsumexp or row.sequence.params.logprobs is not None
    return TopLogitsRequest(max_count, logsumexp, masks) if max_count else None


def _sufficient_count(sequence: Sequence) -> int | None:
    params = sequence.params
    if sequence.is_beam or params.changes_scores or params.logprob_token_ids:
        return None
    if params.logprobs is not None and sequence.restricts_tokens:  # also tokens that are not allowed have ones
        return None
    num_candidates = 1 if params.greedy else params.top_k
    count = max(num_candidates, params.logprobs or 0)
    return count if num_candidates > 0 and count <= MAX_TOP_LOGITS else None


def sample_top_logits(top_logits: TopLogits, rows: Rows[LogitRow]) -> list[SampledTokens]:
    """Sample one token per row, with the same result as the sampler has for full rows.

    But of tokens that tie for the last of the `top_k` places, only the one with the lower id is kept.
    """
    values, ids = top_logits.values.tolist(), top_logits.ids.tolist()
    finite = [isfinite(row[0]) for row in values]
    drawn = [index for index, row in enumerate(rows) if not row.sequence.params.greedy and finite[index]]
    places = [0] * len(rows)
    if drawn:
        for index, place in zip(
            drawn, _sample_random_places(top_logits, [rows[index] for index in drawn], drawn), strict=True
        ):
            places[index] = place
    logprobs = (
        None if top_logits.logsumexp is None else (top_logits.values - top_logits.logsumexp.unsqueeze(1)).tolist()
    )
    return [
        _sampled_tokens(ids[index], None if logprobs is None else logprobs[index], place, row.sequence)
        if finite[index]
        else NOT_SAMPLED
        for index, (place, row) in enumerate(zip(places, rows, strict=True))
    ]


def _sample_random_places(top_logits: TopLogits, rows: Rows[LogitRow], indices: list[int]) -> list[int]:
    """Return the index of each row's sampled token among its top logits, sampled in vocabulary order."""
    order = top_logits.ids[indices].argsort(-1)
    scores = top_logits.values[indices]
    for index, row in enumerate(rows):
        scores[index, row.sequence.params.top_k :] = -torch.inf
    probs = filtered_probabilities(scores.gather(-1, order), [row.sequence.params for row in rows])
    uniforms = [uniform_number(row.sequence.seed, row.position) for row in rows]
    chosen: Tensor = order.gather(-1, multinomial(probs, uniforms).unsqueeze(-1)).squeeze(-1)
    return [int(place) for place in chosen.tolist()]


def _sampled_tokens(ids: list[int], logprobs: list[float] | None, place: int, sequence: Sequence) -> SampledTokens:
    count = sequence.params.logprobs
    if count is None:
        return SampledTokens((ids[place],))
    assert logprobs is not None, "log-probabilities were requested"
    return SampledTokens((ids[place],), (logprobs[place],), tuple(zip(ids[:count], logprobs[:count], strict=True)))


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The scores of some rows as tensors: all [rows], `top_*` [rows, most likely tokens]; `best` is the largest logit."""

    logprobs: Tensor
    ranks: Tensor
    best: Tensor
    top_logprobs: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class SpanScores:
    scored: ScoredSpan
    rows: tuple[ScoredRows, ...]

    def on_host(self) -> tuple[TokenScore, ...]:
        """Return the scores as plain values; none if the logits are not finite. On a device this waits for them."""
        if any(rows_not_finite(rows.best) for rows in self.rows):
            return ()
        target_ids = iter(self.scored.target_ids)
        return tuple(score for rows in self.rows for score in _token_scores(rows, target_ids))


def score_prompts(batch: Batch, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[SpanScores]:
    """Return the scores of each of `batch.scored`, on the device of `hidden` [tokens, size].

    `logits` returns the logits [rows, vocab] of some rows of hidden states.
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
    """Return the scores of target_ids int64 [rows] under logits [rows, vocab]; a rank is 1 plus more likely tokens."""
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
