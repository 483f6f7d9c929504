"""CPU runner of a decoder: it moves KV memory, builds the inputs of a step, runs the model and samples the tokens.

A decode step whose shape was seen before is replayed natively, without the Python interpreter: from token ids to each
row's top logits, or to the input of the output layer if full logits are needed. Only values at fixed addresses change
from step to step. If a model or machine uses operations that cannot be recorded, all steps stay eager and the reason is
kept.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.backends.base import HostBackend
from app.engine.decoder.adapters import AdapterSlots
from app.engine.decoder.kv_cache import KvCache
from app.engine.decoder.picture_rows import block_rows, text_positions, vectors_of
from app.engine.sampling.sampler import Sampler, TokenMasks, sample_top_logits, score_prompts, top_logits_request
from app.engine.scheduler.batch import (
    Batch,
    LogitRow,
    RunsAtOnce,
    SampledTokens,
    ScheduledSpan,
    accepted_by_span,
    logit_rows_of,
)
from app.engine.scheduler.speculation import MAX_SPECULATIVE_ROWS
from app.messages import FIRST_VECTOR_ID, TokenScore
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import AttentionSequence, AttentionStep, KvRows, QkvHeads, split_into_decodes
from armature_kernels.attention.context import AttendWithStates, AttentionSpec, StepContext
from armature_kernels.attention.convolution import convolve
from armature_kernels.attention.flash import BlockRow, attend_in_blocks
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs, StateRun, StateStep, kept_inputs, recur
from armature_kernels.elementwise.activations import TopLogits, TopLogitsRequest
from armature_kernels.elementwise.rope import apply_rope_and_write_kv
from armature_kernels.native.memory import Int64Buffer, empty
from armature_kernels.native.recording import NotRecordable, RecordedOperations, ResultPool, record_dry_run

_MAX_FIXED_TOKENS = 2**16  # step size up to which the inputs keep a fixed address
# queries per attention call if the queries per sequence are limited; this bounds the scratch memory
_MAX_BATCHED_QUERIES = 64
RECORD_AFTER_STEPS = 2  # number of steps of a shape before one is recorded
# Per step: more than any plan for a CPU allows unasked. A recording keeps the results of its step: at 512 tokens about
# 50 MB for a model of 1B parameters, shared by all recordings.
MAX_RECORDED_TOKENS = 1024
MAX_RECORDINGS = 128  # the least recently used recording is dropped
_MAX_COUNTED_SHAPES = 4096  # number of shapes that are counted
HIDDEN_ROWS = TopLogitsRequest(0)  # in place of top logits in the shape of a step that returns hidden states
ShowHidden = Callable[[tuple[ScheduledSpan, ...], Tensor], None]
RecordedShape = tuple[int, int, TopLogitsRequest | None]  # tokens, rows of logits, required top logits


class CpuDecoderRunner(RunsAtOnce):
    """The decode runner of a CPU, for the worker thread only.

    With `max_queries_together` the result of a sequence does not depend on the batch, not even in one bit: at most that
    number of its queries attend together, and tokens are sampled from full logits.
    """

    def __init__(
        self,
        model: Decoder | DecoderReplay,
        kv_cache: KvCache,
        backend: HostBackend,
        sampler: Sampler,
        max_queries_together: int | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self.kv_cache = kv_cache
        self.backend = backend
        self.sampler = sampler
        self._token_ids, self._positions, self._logit_rows = (
            Int64Buffer(_MAX_FIXED_TOKENS),
            Int64Buffer(_MAX_FIXED_TOKENS),
            Int64Buffer(_MAX_FIXED_TOKENS),
        )
        self._attention = StepAttention(kv_cache, backend, max_queries_together)
        self._whole_logits = max_queries_together is not None
        self._masks = TokenMasks(sampler.vocab_size)
        self.show_hidden: ShowHidden | None = None  # set if a draft head reads hidden states
        self.model_seconds = 0.0  # seconds in the model's forward pass, for the last batch
        self.prompt_scores: list[tuple[TokenScore, ...]] = []  # of each of `Batch.scored`, for the last batch

    @property
    def is_first(self) -> bool:
        """True if the last step had a shape that is not replayed yet. A model that is called directly has none."""
        return isinstance(self.model, DecoderReplay) and self.model.is_first

    @property
    def is_native(self) -> bool:
        return isinstance(self.model, DecoderReplay) and self.model.is_native

    def run(self, batch: Batch) -> list[SampledTokens]:
        with torch.inference_mode():
            self.kv_cache.copy_states(batch.state_copies)
            self.kv_cache.move(batch.copies, batch.released)
            rows = logit_rows_of(batch.spans)
            masks = self._masks.for_step(batch.spans, len(rows))
            self._masks = masks or self._masks
            wanted = None if self._whole_logits else top_logits_request(rows, masks)
            needs_hidden = bool(batch.scored) or self.show_hidden is not None
            context = self._context(batch.spans, wanted, needs_hidden)
            started = time.perf_counter()
            outputs = self._outputs_after_hidden(batch, context, rows) if needs_hidden else self.model(context)
            self.backend.synchronize()
            self.model_seconds = time.perf_counter() - started
            if not rows:
                return []
            samples = (
                sample_top_logits(outputs, rows)
                if isinstance(outputs, TopLogits)
                else self.sampler.sample(outputs, rows, masks)
            )
            if self.kv_cache.states and any(span.draft_ids for span in batch.spans):
                self._attention.accept(batch, samples)
            return samples

    def _outputs_after_hidden(self, batch: Batch, context: StepContext, rows: list[LogitRow]) -> Tensor | TopLogits:
        hidden = self.model.hidden(context)
        if self.show_hidden is not None:
            self.show_hidden(batch.spans, hidden)
        if batch.scored:
            scores = score_prompts(batch, hidden, self._all_logits)
            self.prompt_scores = [one.on_host() for one in scores]
        if not rows:
            return hidden[:0]
        sampled: list[int] = []
        end = 0
        for span in batch.spans:
            end += span.num_tokens
            sampled += range(end - span.num_samples, end)
        return self.model.logits(hidden if len(sampled) == end else hidden[sampled], context.top_logits)

    def _all_logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        assert isinstance(logits, Tensor), "all logits were requested"
        return logits

    def _context(
        self, spans: tuple[ScheduledSpan, ...], top_logits: TopLogitsRequest | None, all_rows: bool
    ) -> StepContext:
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for span in spans:
            start, draft_ids, end = span.start, span.draft_ids, span.end
            token_ids += span.sequence.token_ids[start : end - len(draft_ids)]
            token_ids += draft_ids
            positions += text_positions(span) if span.sequence.vectors else range(start, end)
            if span.samples:
                logit_rows += range(len(token_ids) - len(draft_ids) - 1, len(token_ids))
        attend = self._attention.begin(spans)
        if self._adapters is not None:
            self._adapters.begin(spans)
        vectors = vectors_of(spans) if any(span.sequence.vectors for span in spans) else None
        if vectors is not None:
            token_ids = [token if token < FIRST_VECTOR_ID else 0 for token in token_ids]
        num_rows = len(token_ids) if all_rows else len(logit_rows)
        which = None if num_rows == len(token_ids) else self._to_model_device(self._logit_rows.fill(logit_rows))
        ids, places = (
            self._to_model_device(self._token_ids.fill(token_ids)),
            self._to_model_device(self._positions.fill(positions)),
        )
        is_replayable = self._attention.is_replayable and self._token_ids.stays and vectors is None
        shape = (len(token_ids), num_rows) if is_replayable else None
        return StepContext(ids, places, which, attend, top_logits, shape, vectors)

    def _to_model_device(self, values: Tensor) -> Tensor:
        return to_model_device(values, self.backend.device)


def to_model_device(values: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device of the model, on a CPU without a call to torch."""
    return values if device.type == "cpu" else values.to(device)


class StepAttention:
    """The attention of every step. It implements `AttendWithStates`.

    What does not depend on the layer is prepared once per step, at fixed addresses. With `max_queries_together` all
    queries use the same computation, whatever prefill chunk they came in.
    """

    def __init__(self, kv_cache: KvCache, backend: HostBackend, max_queries_together: int | None = None) -> None:
        self._kv_cache = kv_cache
        self._backend = backend
        self._max_queries_together = max_queries_together
        self._step = AttentionStep(max(kv_cache.shape.num_slots, _MAX_BATCHED_QUERIES))
        self._states = StateStep(2 * kv_cache.shape.num_slots + 32)  # a prompt may be several runs
        self._accepted = StateStep(MAX_SPECULATIVE_ROWS)
        # By layer: what draft tokens add to the states, and the function that adds the accepted ones
        self._kept: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
        self._advance: Callable[[], object] | None = None
        self._recurs = self._attends = False
        # parts of the batch, if attention is computed in more than one
        self._parts: list[tuple[slice, list[AttentionSequence]]] = []
        self._rows = Int64Buffer(_MAX_FIXED_TOKENS)
        self._written = self._rows.tensor[:0]
        self._blocks: list[BlockRow] = []

    def begin(self, spans: tuple[ScheduledSpan, ...]) -> AttendWithStates:
        """Prepare the attention of the next step. The previous step's description is overwritten."""
        self._written = to_model_device(self._rows.fill(self._kv_cache.written_rows(spans)), self._backend.device)
        rows: list[AttentionSequence] = []
        first = 0
        for span in spans:
            rows.append(AttentionSequence(first, span.num_tokens, span.start, self._kv_cache.kv_segments(span)))
            first += span.num_tokens
        has_pictures = any(span.sequence.vectors for span in spans)
        self._blocks = block_rows(spans, self._kv_cache.kv_segments) if has_pictures else []
        if self._kv_cache.states:
            pairs = zip(rows, spans, strict=True)
            self._states.fill([run for row, span in pairs for run in _state_runs(row.first, span)])
        self._parts = (
            []
            if self._max_queries_together is None
            else split_into_decodes(rows, self._max_queries_together, _MAX_BATCHED_QUERIES)
        )
        if len(self._parts) < 2:
            self._step.fill(self._parts[0][1] if self._parts else rows)
        return self

    @property
    def is_replayable(self) -> bool:
        """True if no layer's operations depend on the sequences in the batch, only on its shape."""
        attends = self._step.is_replayable or (self._recurs and not self._attends)
        return len(self._parts) < 2 and self._rows.stays and self._states.stays and attends

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Write the layer's keys and values, and return its attention output [tokens, heads * head_dim]."""
        self._attends = True
        kv = self._kv_cache.layers[layer].heads_of(heads)
        query = apply_rope_and_write_kv(heads, kv, self._written)
        if len(self._parts) < 2:
            mixed = self._attend(query, kv, spec)
        else:
            results = []
            for own, rows in self._parts:
                self._step.fill(rows)
                results.append(self._attend(query[own], kv, spec))
            mixed = torch.cat(results)
        if spec.sees_blocks and self._blocks:
            attend_in_blocks(query, kv, self._blocks, spec, mixed)
        return mixed.flatten(1)

    def recur(self, layer: int, inputs: RecurrentInputs, recurrence: Recurrence) -> Tensor:
        sizes, states = recurrence.sizes, self._kv_cache.states[layer]

        def advance(kept: Tensor) -> Tensor:
            return recur(kept_inputs(kept, sizes), recurrence, states, self._accepted, self._by_token)

        kept = self._kept_rows(layer, len(inputs.channels), sizes.input_elements, advance)
        return recur(inputs, recurrence, states, self._states, self._by_token, kept)

    def convolve(self, layer: int, x: Tensor, filters: Tensor) -> Tensor:
        states = self._kv_cache.states[layer]

        def advance(kept: Tensor) -> Tensor:
            return convolve(kept, filters, states, self._accepted, gated=False)

        return convolve(x, filters, states, self._states, self._kept_rows(layer, len(x), filters.shape[1], advance))

    def _kept_rows(
        self, layer: int, num_tokens: int, elements: int, advance: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return where a layer keeps what a step's tokens add to the states; None for a step that has no drafts."""
        self._recurs = True
        if num_tokens > MAX_SPECULATIVE_ROWS:
            return None
        known = self._kept.get(layer)
        rows = empty((MAX_SPECULATIVE_ROWS, elements), torch.float32) if known is None else known[0]
        self._kept[layer] = rows, advance
        return rows

    def accept(self, batch: Batch, samples: Sequence[SampledTokens]) -> None:
        """Advance the states of the last step's sequences with draft tokens by all tokens that are accepted."""
        assert batch.num_tokens <= MAX_SPECULATIVE_ROWS, "the inputs of more rows are not kept"
        pairs = zip(self._states.runs, accepted_by_span(batch, samples), strict=True)
        self._accepted.fill(
            [
                replace(run, num_tokens=run.num_tokens - len(span.draft_ids) + len(accepted) - 1, drafts=False)
                for run, (span, accepted) in pairs
                if run.drafts
            ]
        )
        if self._advance is None:
            try:
                self._advance = record_dry_run(ResultPool(), self._advance_layers).run
            except NotRecordable:
                self._advance = self._advance_layers
        self._advance()

    def _advance_layers(self) -> None:
        for kept, advance in self._kept.values():
            advance(kept)

    @property
    def _by_token(self) -> bool:
        return self._max_queries_together is not None

    def _attend(self, query: Tensor, kv: KvRows, spec: AttentionSpec) -> Tensor:
        return self._backend.attention(query, kv, self._step, spec)


def _state_runs(first: int, span: ScheduledSpan) -> Iterator[StateRun]:
    """Yield the runs of a span, whose first row is `first`: one up to each position at which the state is saved."""
    start = span.start
    for position, saved in span.saves:
        yield StateRun(first + start - span.start, position - start, start, span.slot, saved=saved)
        start = position
    if start < span.end:
        yield StateRun(first + start - span.start, span.end - start, start, span.slot, bool(span.draft_ids))


class DecoderReplay:
    def __init__(self, model: Decoder, disabled_reason: str = "", record_after: int = RECORD_AFTER_STEPS) -> None:
        self.model = model
        self.reason = disabled_reason  # reason why every step is eager; empty if steps are recorded
        self.num_steps = 0  # number of steps
        self.num_replays = 0  # number of them that were replayed
        self.is_first = False  # the last step had a shape that is not replayed yet, so it took longer
        self.is_native = False  # the last step was replayed
        self._pool = ResultPool()
        self._num_seen: Counter[RecordedShape] = Counter()
        self._record_after = record_after
        self.recorded: OrderedDict[RecordedShape, RecordedOperations] = OrderedDict()

    def __call__(self, context: StepContext) -> Tensor | TopLogits:
        result = self._compute(context, context.top_logits)
        return result if isinstance(result, TopLogits) else self.model.outputs(result, context.top_logits)

    def hidden(self, context: StepContext) -> Tensor:
        """Compute a step as the model's `hidden` does. The next step may overwrite the result."""
        result: Tensor = self._compute(context, HIDDEN_ROWS)
        return result

    def logits(self, hidden: Tensor, wanted: TopLogitsRequest | None = None) -> Tensor | TopLogits:
        return self.model.logits(hidden, wanted)

    def _body(self, wanted: TopLogitsRequest | None) -> Callable[[StepContext], Any]:
        model = self.model
        if wanted is HIDDEN_ROWS:
            return model.hidden
        return model.forward if wanted is not None and model.output.has_top_logits else model.body

    def _compute(self, context: StepContext, wanted: TopLogitsRequest | None) -> Any:
        self.is_first = self.is_native = False
        self.num_steps += 1
        if self.reason or context.shape is None or context.shape[0] > MAX_RECORDED_TOKENS:
            return self._body(wanted)(context)
        shape = (*context.shape, wanted)
        recorded = self.recorded.get(shape)
        if recorded is None:
            return self._eager(self._body(wanted), shape, context)
        self.recorded.move_to_end(shape)
        self.num_replays += 1
        self.is_native = True
        return recorded.run()

    def _eager(self, body: Callable[[StepContext], Any], shape: RecordedShape, context: StepContext) -> Any:
        self._num_seen[shape] += 1
        self.is_first = True
        if self._num_seen[shape] <= self._record_after:
            if len(self._num_seen) > _MAX_COUNTED_SHAPES:
                self._num_seen.clear()
            return body(context)
        try:  # nothing is computed, so that a recurrent state does not change twice if the recording ends
            recorded = record_dry_run(self._pool, lambda: body(context))
        except NotRecordable as reason:
            self.reason = f"{reason} is not a native operation"
            return body(context)
        self.recorded[shape] = recorded
        if len(self.recorded) > MAX_RECORDINGS:
            self.recorded.popitem(last=False)
        return recorded.run()
