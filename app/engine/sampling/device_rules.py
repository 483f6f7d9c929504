"""Sampling on a device of the rows that more applies to than temperature, top_k, top_p and min_p.

Penalties, masks of allowed tokens and log-probabilities are computed where the logits are, so the host neither waits for
logits nor for the tokens before. The reference is `Sampler`, which also serves beams, and devices without float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from app.engine.sampling.rows import MIN_TEMPERATURE, SamplingTensors, sample_greedy, sample_random
from app.engine.scheduler.batch import NOT_FINITE, LogitRow, SampledTokens, Sequence
from app.messages import SamplingParams

_IN_PROMPT = 2**30  # added to a token's occurrences in the completion if the prompt has it


class Rule(Enum):
    NONE = "none"  # sampled with all other rows
    DEVICE = "device"  # sampled by `DeviceRules`
    HOST = "host"  # sampled by `Sampler`


def rule_of(sequence: Sequence, can_sample: bool) -> Rule:
    """Return which part samples a sequence's tokens; `can_sample`: the device has float64."""
    params = sequence.params
    if sequence.is_beam:
        return Rule.HOST
    if params.changes_scores or params.logprobs is not None or sequence.restricts_tokens:
        return Rule.DEVICE if can_sample else Rule.HOST
    return Rule.NONE if can_sample or params.greedy else Rule.HOST


def needs_host(sequence: Sequence, can_sample: bool) -> bool:
    """Return True if the host must know a sequence's last token before the next one is sampled."""
    return (
        rule_of(sequence, can_sample) is Rule.HOST
        or sequence.grammar is not None
        or bool(sequence.bad_word_ids)
        or (sequence.thinking is not None and sequence.thinking.is_near)
    )


class TokenTallies:
    """How often each token occurs in each sequence, int32 [rows, vocab] on the device.

    A tally holds the tokens before the one to sample. It follows a sequence that the host has not seen the last token of,
    and a step that is launched again changes nothing.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._rows: dict[int, tuple[Sequence, int]] = {}  # by id: the sequence, so that its id stays its own, and a row
        self._tokens: dict[int, int] = {}  # by id: number of tokens that the tally holds

    def update(self, rows: Items[LogitRow], last_ids: Tensor) -> Tensor:
        """Take the token before each row's, `last_ids` int64 [rows] on the device. Return the tallies [rows, vocab]."""
        self._make_room(rows)
        added = []
        for at, row in enumerate(rows):
            key, held = id(row.sequence), self._tokens.get(id(row.sequence))
            if held == row.position - 1:
                added.append(at)
            elif held != row.position:
                self._count(row)
            self._tokens[key] = row.position
        own = torch.tensor([self._rows[id(row.sequence)][1] for row in rows], device=self._counts.device)
        if added:
            some = slice(None) if len(added) == len(rows) else torch.tensor(added, device=own.device)
            ids = last_ids[some].clamp_min(0)
            self._counts.index_put_((own[some], ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        return self._counts.index_select(0, own)

    def _make_room(self, rows: Items[LogitRow]) -> None:
        new = [row.sequence for row in rows if id(row.sequence) not in self._rows]
        if not new:
            return
        for key, (sequence, _) in list(self._rows.items()):
            if sequence.slot is None:  # finished or preempted
                del self._rows[key]
                self._tokens.pop(key, None)
        taken = {row for _, row in self._rows.values()}
        free = [row for row in range(len(self._counts)) if row not in taken]
        if len(free) < len(new):
            more = max(len(new) - len(free), len(self._counts))
            free += range(len(self._counts), len(self._counts) + more)
            grown = self._counts.new_zeros((len(self._counts) + more, self._counts.shape[1]))
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        for sequence, row in zip(new, free, strict=False):
            self._rows[id(sequence)] = (sequence, row)

    def _count(self, row: LogitRow) -> None:
        sequence, vocab_size = row.sequence, self._counts.shape[1]
        assert sequence.slot is None or len(sequence.token_ids) >= row.position, "the host knows these tokens"
        num_prompt, prompt, completion = sequence.num_prompt_tokens, set[int](), dict[int, int]()
        for token_id in sequence.token_ids[num_prompt : row.position]:
            completion[token_id] = completion.get(token_id, 0) + 1
        prompt.update(one for one in sequence.token_ids[sequence.num_source_tokens : num_prompt] if one < vocab_size)
        counts = {one: completion.get(one, 0) + _IN_PROMPT * (one in prompt) for one in prompt | completion.keys()}
        own = self._counts[self._rows[id(sequence)][1]].zero_()
        if counts:
            ids, values = torch.tensor([list(counts.keys()), list(counts.values())]).to(own.device)
            own.index_copy_(0, ids, values.to(torch.int32))


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of some rows, fp32 [rows, 1] each, and their biases: places in the flat scores, and values."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    biased: Tensor
    biases: Tensor

    @classmethod
    def of(cls, params: Items[SamplingParams], vocab_size: int, device: torch.device) -> Penalties:
        columns = torch.tensor(
            [
                [max(one.repetition_penalty, MIN_TEMPERATURE), one.presence_penalty, one.frequency_penalty]
                for one in params
            ]
        ).to(device)
        repetition, presence, frequency = (columns[:, at : at + 1] for at in range(3))
        biases = [(row * vocab_size + token, bias) for row, one in enumerate(params) for token, bias in one.logit_bias]
        places = torch.tensor([place for place, _ in biases], dtype=torch.int64).to(device)
        values = torch.tensor([bias for _, bias in biases], dtype=torch.float32).to(device)
        return cls(repetition, presence, frequency, places, values)

    def apply(self, scores: Tensor, tallies: Tensor | None) -> Tensor:
        """Return scores fp32 [rows, vocab] after penalties; `tallies` is None if there are only biases."""
        if tallies is not None:
            penalized = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
            scores = torch.where(tallies != 0, penalized, scores)
            counts = tallies % _IN_PROMPT
            scores = scores - torch.where(counts > 0, counts * self.frequency + self.presence, 0.0)
        if len(self.biased):
            scores = scores.flatten().index_add_(0, self.biased, self.biases).view(scores.shape)
        return scores


@dataclass(frozen=True, slots=True)
class RuledRows:
    """Some rows of a step, and what the device needs to know of them; it stays valid while the same sequences decode."""

    places: tuple[int, ...]  # among the step's rows of logits
    sequences: tuple[Sequence, ...]
    at: Tensor  # the places int64 on the device
    penalties: Penalties | None
    reported: tuple[int, ...]  # rows, of these, with log-probabilities
    reported_at: Tensor
    named: Tensor  # token ids whose log-probabilities were asked for, [reported, most]
    num_top: int

    @classmethod
    def of(cls, places: Items[int], sequences: Items[Sequence], vocab_size: int, device: torch.device) -> RuledRows:
        params = [sequence.params for sequence in sequences]
        changes = any(one.changes_scores for one in params)
        reported = [row for row, one in enumerate(params) if one.logprobs is not None]
        names = [params[row].logprob_token_ids for row in reported]
        most = max(map(len, names), default=0)
        named = [[*ids, *[0] * (most - len(ids))] for ids in names]
        return cls(
            tuple(places),
            tuple(sequences),
            torch.tensor(places, dtype=torch.int64).to(device),
            Penalties.of(params, vocab_size, device) if changes else None,
            tuple(reported),
            torch.tensor(reported, dtype=torch.int64).to(device),
            torch.tensor(named, dtype=torch.int64).view(len(reported), most).to(device),
            min(vocab_size, max((params[row].logprobs or 0 for row in reported), default=0)),
        )

    def is_of(self, places: Items[int], sequences: Items[Sequence]) -> bool:
        return self.places == tuple(places) and all(
            one is other for one, other in zip(self.sequences, sequences, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Log-probabilities of some rows on their way to the host: int64, of which all but the ids are fp64 by their bits.

    A row has the ids of its most likely tokens, then their log-probabilities, that of its own, and those that it names.
    """

    rows: RuledRows
    packed: Tensor

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor, rows: RuledRows) -> LogprobReport:
        """Compute the report of logits fp32 [rows, vocab] before any rule, with the ids sampled for `rows`."""
        logprobs = torch.log_softmax(logits.index_select(0, rows.reported_at), -1)
        values, top_ids = logprobs.topk(rows.num_top)
        own = logprobs.gather(1, ids.index_select(0, rows.reported_at).clamp_min(0).unsqueeze(1))
        numbers = torch.cat((values, own, logprobs.gather(1, rows.named)), 1).double()
        return cls(rows, torch.cat((top_ids, numbers.view(torch.int64)), 1))

    def on_host(self, packed: Tensor) -> LogprobReport:
        """Copy the report to `packed`, host memory of its size, without waiting."""
        target = packed[: self.packed.numel()].view(self.packed.shape)
        target.copy_(self.packed, non_blocking=True)
        return LogprobReport(self.rows, target)

    def kept(self) -> LogprobReport:
        return LogprobReport(self.rows, self.packed.clone())

    def add_to(self, samples: list[SampledTokens]) -> None:
        """Add the log-probabilities to a step's samples, once the copy is done."""
        width = self.rows.num_top
        ids, numbers = self.packed[:, :width].tolist(), self.packed[:, width:].contiguous().view(torch.float64).tolist()
        for row, top_ids, values in zip(self.rows.reported, ids, numbers, strict=True):
            place, params = self.rows.places[row], self.rows.sequences[row].params
            token_id, own = samples[place].token_ids[0], values[width]
            if token_id == NOT_FINITE:
                continue
            best = sorted(zip(top_ids, values[:width], strict=True), key=lambda pair: (-pair[1], pair[0]))
            if params.logprob_token_ids:
                named = {**dict(zip(params.logprob_token_ids, values[width + 1 :], strict=False)), token_id: own}
                top = tuple(sorted(named.items(), key=lambda pair: (-pair[1], pair[0])))
            else:
                top = tuple(best[: params.logprobs])
            samples[place] = SampledTokens((token_id,), (own,), top)


class DeviceRules:
    """Samples rows with rules from the logits of a step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._tallies = TokenTallies(vocab_size, device)
        self._last: RuledRows | None = None

    def rows(self, places: Items[int], sequences: Items[Sequence]) -> RuledRows:
        if self._last is None or not self._last.is_of(places, sequences):
            self._last = RuledRows.of(places, sequences, self._vocab_size, self._device)
        return self._last

    def sample(
        self,
        logits: Tensor,
        ruled: RuledRows,
        rows: Items[LogitRow],
        last_ids: Tensor,
        masks: Tensor | None,
        sampling: SamplingTensors | None,
    ) -> tuple[Tensor, LogprobReport | None]:
        """Return the ids int64 [ruled rows] sampled from a step's logits [rows, vocab], and the report, if one is wanted.

        Args:
            logits: All rows of the step.
            ruled: The rows that are sampled.
            rows: The positions of these rows.
            last_ids: int64 [ruled rows], the token before each.
            masks: int32 [ruled rows, ceil(vocab / 32)]; None if no row is restricted.
            sampling: Parameters of all rows of the step; None if all are greedy.
        """
        given = logits.index_select(0, ruled.at).float()
        scores = given if masks is None else given.masked_fill(forbidden(masks, self._vocab_size), -torch.inf)
        if ruled.penalties is not None:
            counts = any(sequence.params.has_penalties for sequence in ruled.sequences)
            tallies = self._tallies.update(rows, last_ids) if counts else None
            scores = ruled.penalties.apply(scores, tallies)
        if sampling is None:
            ids = sample_greedy(scores)
        else:
            columns = {name: values.index_select(0, ruled.at) for name, values in sampling.columns.items()}
            ids = sample_random(scores, SamplingTensors(columns, sampling.uniforms.index_select(0, ruled.at)))
        ids = torch.where(given.amax(-1).isfinite(), ids, NOT_FINITE)
        return ids, LogprobReport.of(given, ids, ruled) if ruled.reported else None


def forbidden(masks: Tensor, vocab_size: int) -> Tensor:
    """Return booleans [rows, vocab] of the tokens that masks int32 [rows, ceil(vocab / 32)] do not allow."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks.unsqueeze(-1) >> bits) & 1
    return (allowed == 0).flatten(1)[:, :vocab_size]
