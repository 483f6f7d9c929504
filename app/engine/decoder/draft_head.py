"""Drafts of a checkpoint's own head of multi-token prediction, which reads hidden states of the served model.

The runner of the served model shows the hidden states of every step. They are kept for a few sequences until the head has
computed them; then the head goes on from its own. Where a prefix was not computed, the head does not see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.backends.base import HostBackend
from app.engine.decoder.cpu_runner import StepAttention
from app.engine.decoder.draft_model import DraftedSequence, DraftModel
from app.engine.decoder.kv_cache import KvCache
from app.engine.sampling.sampler import Sampler, sample_top_logits, top_logits_request
from app.engine.scheduler.batch import Batch, SampledTokens, ScheduledSpan, Sequence, logit_rows_of
from app.models.decoders.draft_head import Head
from armature_kernels.attention.context import StepContext, TokenVectors
from armature_kernels.elementwise.activations import TopLogits


@dataclass(slots=True, eq=False)
class HiddenRows:
    """What the head reads of a sequence: inputs of the positions `[base, end)` in parts (first position, rows).

    `own`: the input after them, of the head's own hidden state.
    """

    base: int
    end: int
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    own: Tensor | None = None

    def add(self, start: int, rows: Tensor) -> None:
        """Keep rows from position `start` on, in place of those that were known."""
        self.parts = [(first, part[: start - first]) for first, part in self.parts if first < start]
        self.parts.append((start, rows))
        self.end = start + len(rows)

    def take(self, start: int, end: int) -> Tensor:
        """Return the rows of positions `[start, end)`; those before are not needed any more."""
        self.parts = [(first, part) for first, part in self.parts if first + len(part) > start]
        stop = min(end, self.end)
        known = [part[max(0, start - first) : max(0, stop - first)] for first, part in self.parts]
        if end > self.end:
            assert self.own is not None and end <= max(start, self.end) + 1, "the head goes on token by token"
            known.append(self.own)
        return torch.cat(known)


class HeadRunner:
    """The runner of a head. Position p of its sequences is that of the hidden state; token p is the one after it."""

    is_first = False

    def __init__(self, head: Head, kv_cache: KvCache, backend: HostBackend) -> None:
        self.head, self.kv_cache, self.sampler = head, kv_cache, Sampler(head.config.vocab_size)
        self.rows: dict[int, HiddenRows] = {}  # by slot
        self._attention = StepAttention(kv_cache, backend)

    def run(self, batch: Batch) -> list[SampledTokens]:
        with torch.inference_mode():
            spans = batch.spans
            hidden = self.head.hidden(self._context(spans))
            if not spans[0].samples:
                return []
            own = self.head.inputs(hidden, is_own=True)
            for place, span in enumerate(spans):
                self.rows[span.slot].own = own[place : place + 1]
            rows = logit_rows_of(spans)
            outputs = self.head.logits(hidden, top_logits_request(rows, None))
            if isinstance(outputs, TopLogits):
                return sample_top_logits(outputs, rows)
            return self.sampler.sample(outputs, rows, None)

    def _context(self, spans: tuple[ScheduledSpan, ...]) -> StepContext:
        ids = [token for span in spans for token in span.sequence.token_ids[span.start : span.end]]
        positions = [at for span in spans for at in range(span.start, span.end)]
        ends = torch.tensor([span.num_tokens for span in spans]).cumsum(0) - 1
        vectors = TokenVectors(torch.arange(len(ids)), torch.cat([self._inputs(span) for span in spans]))
        attend = self._attention.begin(spans)
        return StepContext(torch.tensor(ids), torch.tensor(positions), ends, attend, vectors=vectors)

    def _inputs(self, span: ScheduledSpan) -> Tensor:
        known = self.rows[span.slot]
        return known.take(known.base + span.start, known.base + span.end)


class AssistantRunner(HeadRunner):
    """The runner of a head that reads the model's keys and values. All drafts of a round have the position of its first token."""

    def __init__(self, head: Head, kv_cache: KvCache, backend: HostBackend, served: KvCache) -> None:
        super().__init__(head, kv_cache, backend)
        self._attention = StepAttention(served, backend)
        self.served: dict[int, Sequence] = {}  # by slot

    def _context(self, spans: tuple[ScheduledSpan, ...]) -> StepContext:
        pairs = [(self.rows[span.slot].end, self.served[span.slot]) for span in spans]
        read = tuple(
            ScheduledSpan(one, end - 1, 1, one.slot or 0, one.prefix_slot, one.prefix_tokens, samples=True)
            for end, one in pairs
        )
        ids = torch.tensor([span.sequence.token_ids[-1] for span in spans])
        vectors = TokenVectors(torch.arange(len(ids)), torch.cat([self._inputs(span) for span in spans]))
        positions = torch.tensor([end for end, _ in pairs])
        return StepContext(ids, positions, None, self._attention.begin(read), vectors=vectors)

    def _inputs(self, span: ScheduledSpan) -> Tensor:
        known = self.rows[span.slot]
        if span.start == known.end:
            return known.take(known.end - 1, known.end)
        assert known.own is not None, "the first draft of a round was computed"
        return known.own


class HeadDrafts(DraftModel):
    """Drafts for several sequences at once. `observe` gets the hidden states of each step of the served model."""

    def __init__(self, runner: HeadRunner, capacity_tokens: int) -> None:
        super().__init__(runner, capacity_tokens)
        self._head_runner = runner
        self._known: dict[Sequence, HiddenRows] = {}

    def observe(self, spans: Iterable[ScheduledSpan], hidden: Tensor) -> None:
        """Keep hidden states before the last norm [tokens, size] of a step, which the next one may overwrite."""
        rows, first = self._head_runner.head.inputs(hidden, is_own=False), 0
        for span in spans:
            start = self._first_kept(span)
            own, first = rows[first + start - span.start : first + span.num_tokens], first + span.num_tokens
            known = self._known.get(span.sequence)
            if known is not None and not known.base <= span.start <= known.end:
                self.forget(span.sequence)
                known = None
            if known is None:
                if len(self._known) == self._head_runner.kv_cache.shape.num_slots or not _can_follow(span.sequence):
                    continue
                known = self._known[span.sequence] = HiddenRows(span.start, span.start)
            known.add(start, own.clone())

    def is_ready(self, sequence: Sequence) -> bool:
        return self._sees(sequence) and super().is_ready(sequence)

    def _sees(self, sequence: Sequence) -> bool:
        known = self._known.get(sequence)
        return known is not None and known.end >= len(sequence.token_ids) - 1

    def _first_kept(self, span: ScheduledSpan) -> int:
        return span.start

    def propose(self, sequences: list[Sequence], num_tokens: int) -> Mapping[Sequence, tuple[int, ...]]:
        for sequence in sequences:
            known = self._known[sequence]
            known.end = len(sequence.token_ids) - 1  # later ones are of rejected tokens
        return super().propose(sequences, num_tokens)

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self._known.pop(sequence, None)

    def _follow(self, known: DraftedSequence, sequence: Sequence) -> None:
        """Take over a sequence's tokens; what was computed after the head's own hidden states is computed again."""
        own, tokens = known.own, self._known_ids(sequence)
        own.num_computed = min(own.num_computed, own.num_prompt_tokens, len(tokens) - 1)
        own.token_ids, own.num_prompt_tokens = tokens, len(tokens)
        self._head_runner.rows[known.slot] = self._known[sequence]

    def _known_ids(self, sequence: Sequence) -> list[int]:
        return sequence.token_ids[self._known[sequence].base + 1 :]


class AssistantDrafts(HeadDrafts):
    """The same for a head that computes nothing of the tokens before."""

    def __init__(self, runner: AssistantRunner, capacity_tokens: int) -> None:
        super().__init__(runner, capacity_tokens)
        self._assistant = runner

    def is_ready(self, sequence: Sequence) -> bool:
        if not self._sees(sequence) or not (sequence in self._drafted or self._free):
            return False
        if sequence not in self._drafted:
            self._drafted[sequence] = self._copy_of(sequence)
        self._follow(self._drafted[sequence], sequence)
        return True

    def _follow(self, known: DraftedSequence, sequence: Sequence) -> None:
        known.own.token_ids = list(sequence.token_ids)
        known.own.num_computed = len(sequence.token_ids) - 1
        self._head_runner.rows[known.slot], self._assistant.served[known.slot] = self._known[sequence], sequence

    def _first_kept(self, span: ScheduledSpan) -> int:
        return max(span.start, span.known_end - 1)

    def _known_ids(self, sequence: Sequence) -> list[int]:
        return list(sequence.token_ids)


def _can_follow(sequence: Sequence) -> bool:
    return not sequence.is_beam and not sequence.vectors and not sequence.params.has_penalties
