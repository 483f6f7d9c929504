"""CPU runner of a decoder: it moves KV memory, builds the inputs of a step, runs the model and samples the tokens.

The scheduler decides which sequences are in the batch. The backend computes attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.backends.base import Backend
from app.engine.batch import Batch, Computed, Flight, Picked, Span, rows_to_pick
from app.engine.kv_cache import KVCache
from app.engine.picking import pick_best, wanted_best
from app.engine.sampler import Sampler
from app.kernels.attention import Row, Step, few_at_a_time
from app.kernels.best import Best, Wanted
from app.kernels.memory import Words
from app.kernels.turn import Heads, turn
from app.models.context import Attend, AttentionSpec, StepContext

_STEP_TOKENS = 2**16  # step size up to which the inputs keep a fixed address
# queries per attention call if the queries per sequence are limited; this bounds the scratch memory
_QUERIES_TOGETHER = 64


class Runner:
    """The decode runner of a CPU. It is used on the worker thread only.

    Between two calls it keeps no state except the KV cache and reusable buffers. If `max_queries_together` is set,
    the result of a sequence does not depend on the other sequences of the batch, not even in one bit: at most that
    number of its queries attend together, and tokens are always sampled from full logits.
    """

    def __init__(
        self,
        model: Callable[[StepContext], Tensor | Best],
        kv_cache: KVCache,
        backend: Backend,
        sampler: Sampler,
        few_queries: int | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.sampler = sampler
        self._token_ids, self._positions, self._logit_rows = Words(_STEP_TOKENS), Words(_STEP_TOKENS), Words(_STEP_TOKENS)
        self._attention = StepAttention(kv_cache, backend, few_queries)
        self._whole_logits = few_queries is not None
        self.model_seconds = 0.0  # seconds in the model's forward pass, for the last batch

    def launch(self, batch: Batch, after: Flight | None = None) -> Flight:
        """Compute the step at once: on the CPU, the caller has nothing else to do meanwhile."""
        assert after is None, "the CPU runner launches no step ahead"
        return Computed(batch, self.run(batch))

    def wait(self, flight: Flight) -> Items[Picked]:
        """Return the samples of a completed step."""
        assert isinstance(flight, Computed), "the step must come from this runner"
        return flight.picked

    def follows(self, batch: Batch) -> bool:
        """Return False: no step is launched ahead on the CPU."""
        return False

    def survives(self, error: Exception) -> bool:
        """Return False: a system that is out of memory ends the process."""
        return False

    def run(self, batch: Batch) -> list[Picked]:
        """Compute a batch and return one `SampledTokens` for each row that samples.

        The rows are in the order of the spans, and within a span the last known token comes before the draft
        tokens. Copies are done before releases, because a released page may be the source of a copy. Released
        pages hold nothing that this step needs.
        """
        with torch.inference_mode():
            for copy in batch.copies:
                self.kv_cache.copy(copy)
            for slot, start, end in batch.released:
                self.kv_cache.release(slot, start, end)
            rows = rows_to_pick(batch.spans)
            context = self._context(batch.spans, None if self._whole_logits else wanted_best(rows))
            started = time.perf_counter()
            outputs = self.model(context)
            self.backend.synchronize()
            self.model_seconds = time.perf_counter() - started
            if not rows:
                return []
            return pick_best(outputs, rows) if isinstance(outputs, Best) else self.sampler.pick(outputs, rows)

    def _context(self, spans: tuple[Span, ...], wanted: Wanted | None) -> StepContext:
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for span in spans:
            start, guesses, end = span.start, span.draft_ids, span.end
            token_ids += span.sequence.token_ids[start : end - len(guesses)]
            token_ids += guesses
            positions += range(start, end)
            if span.samples:
                logit_rows += range(len(token_ids) - len(guesses) - 1, len(token_ids))
        attend = self._attention.begin(spans)
        which = None if len(logit_rows) == len(token_ids) else self._here(self._logit_rows.fill(logit_rows))
        ids, places = self._here(self._token_ids.fill(token_ids)), self._here(self._positions.fill(positions))
        shape = (len(token_ids), len(logit_rows)) if self._attention.stays and self._token_ids.stays else None
        return StepContext(ids, places, which, attend, wanted, shape)

    def _here(self, words: Tensor) -> Tensor:
        return here(words, self.backend.device)


def here(words: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device of the model. On a CPU it is returned as it is, without a call to torch."""
    return words if device.type == "cpu" else words.to(device)


class StepAttention:
    """The attention of every step. It implements `Attend`.

    Everything that does not depend on the layer is prepared once per step, at fixed addresses. If
    `max_queries_together` is set, at most that number of a sequence's queries attend together. All queries then
    use the same computation, independent of the prefill chunk that they came in.
    """

    def __init__(self, kv_cache: KVCache, backend: Backend, few_queries: int | None = None) -> None:
        self._kv_cache = kv_cache
        self._backend = backend
        self._few_queries = few_queries
        self._step = Step(max(kv_cache.shape.num_slots, _QUERIES_TOGETHER))
        # parts of the batch, if attention is computed in more than one
        self._parts: list[tuple[slice, list[Row]]] = []
        self._rows = Words(_STEP_TOKENS)
        self._written = self._rows.tensor[:0]

    def begin(self, spans: tuple[Span, ...]) -> Attend:
        """Prepare the attention of the next step. The previous step's description is overwritten."""
        self._written = here(self._rows.fill(self._kv_cache.written_rows(spans)), self._backend.device)
        rows: list[Row] = []
        first = 0
        for span in spans:
            rows.append(Row(first, span.num_tokens, span.start, self._kv_cache.runs(span)))
            first += span.num_tokens
        self._parts = [] if self._few_queries is None else few_at_a_time(rows, self._few_queries, _QUERIES_TOGETHER)
        if len(self._parts) < 2:
            self._step.fill(self._parts[0][1] if self._parts else rows)
        return self

    @property
    def stays(self) -> bool:
        """True if the step can be replayed for other steps of the same shape.

        Then no layer's operations depend on the sequences in the batch.
        """
        return len(self._parts) < 2 and self._rows.stays and self._step.stays(self._kv_cache.layers[0])

    def __call__(self, layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
        """Write the layer's keys and values, and return its attention output [tokens, heads * head_dim]."""
        kv = self._kv_cache.layers[layer]
        query = turn(heads, kv, self._written)
        if len(self._parts) < 2:
            return self._backend.attention(query, kv, self._step, spec).flatten(1)
        results = []
        for own, rows in self._parts:
            self._step.fill(rows)
            results.append(self._backend.attention(query[own], kv, self._step, spec))
        return torch.cat(results).flatten(1)
