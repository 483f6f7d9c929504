"""Carries out a batch: moves KV memory, builds the few tensors of a step, runs the model, lets the sampler pick.

Who is in the batch is the scheduler's decision; how a device attends is the backend's.
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

_STEP_TOKENS = 2**16  # tokens of a step that are described at one address
_QUERIES_TOGETHER = 64  # where a prompt attends a few queries at a time: what bounds the scratch


class Runner:
    """Tensors in, ids out. Lives on the worker thread, between two calls it holds no state but the KV cache and room.

    With `few_queries`, what is said of a sequence does not depend on its neighbours, not in a bit: at most so many of its queries attend
    together, and picks are always made from whole logits.
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
        self.model_seconds = 0.0  # of the last batch, in the model's forward pass

    def launch(self, batch: Batch, after: Flight | None = None) -> Flight:
        """Whoever launches has nothing else to do meanwhile: the step is computed at once."""
        assert after is None, "nothing is launched on top of what is computed already"
        return Computed(batch, self.run(batch))

    def wait(self, flight: Flight) -> Items[Picked]:
        assert isinstance(flight, Computed), "one of ours"
        return flight.picked

    def follows(self, batch: Batch) -> bool:
        return False

    def survives(self, error: Exception) -> bool:
        """A system that has no more memory ends the process."""
        return False

    def run(self, batch: Batch) -> list[Picked]:
        """One `Picked` for each row that samples: spans in order, of each its last own token and then its guesses.

        Copies come first: their source may be what is released. What is released holds nothing that this step needs.
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
    """Where the model reads them; on a processor that is where they are, and torch need not be asked."""
    return words if device.type == "cpu" else words.to(device)


class StepAttention:
    """The `Attend` of every step: what does not depend on the layer is worked out once a step, in memory whose address stays.

    With `few_queries`, no more of a sequence attend together: all go the same road, whatever chunk they came in.
    """

    def __init__(self, kv_cache: KVCache, backend: Backend, few_queries: int | None = None) -> None:
        self._kv_cache = kv_cache
        self._backend = backend
        self._few_queries = few_queries
        self._step = Step(max(kv_cache.shape.num_slots, _QUERIES_TOGETHER))
        self._parts: list[tuple[slice, list[Row]]] = []  # of the batch, where it attends in more than one
        self._rows = Words(_STEP_TOKENS)
        self._written = self._rows.tensor[:0]

    def begin(self, spans: tuple[Span, ...]) -> Attend:
        """Describes the next step; what was described before is forgotten."""
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
        """Whether the step can be run again for another like it: no layer does anything that depends on who is in it."""
        return len(self._parts) < 2 and self._rows.stays and self._step.stays(self._kv_cache.layers[0])

    def __call__(self, layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
        kv = self._kv_cache.layers[layer]
        query = turn(heads, kv, self._written)
        if len(self._parts) < 2:
            return self._backend.attention(query, kv, self._step, spec).flatten(1)
        results = []
        for own, rows in self._parts:
            self._step.fill(rows)
            results.append(self._backend.attention(query[own], kv, self._step, spec))
        return torch.cat(results).flatten(1)
