"""Carries out a batch: moves KV memory, builds the few tensors of a step, runs the model, lets the sampler pick.

Who is in the batch is the scheduler's decision; how a device attends is the backend's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from app.backends.base import AttentionRow, Backend
from app.engine.batch import Batch, Picked, Span
from app.engine.kv_cache import KVCache
from app.engine.sampler import Sampler
from app.models.context import Attend, AttentionSpec, StepContext


class Runner:
    """Tensors in, ids out. Lives on the worker thread, between two calls it holds no state but the KV cache."""

    def __init__(self, model: Callable[[StepContext], Tensor], kv_cache: KVCache, backend: Backend, sampler: Sampler) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.sampler = sampler
        self.model_seconds = 0.0  # of the last batch, in the model's forward pass

    def run(self, batch: Batch) -> list[Picked]:
        """One `Picked` for each span that samples, in span order.

        Copies come first: their source may be what is released. What is released holds nothing that this step needs.
        """
        with torch.inference_mode():
            for copy in batch.copies:
                self.kv_cache.copy(copy)
            for slot, start, end in batch.released:
                self.kv_cache.release(slot, start, end)
            context = self._context(batch.spans)
            started = time.perf_counter()
            logits = self.model(context)
            self.backend.synchronize()
            self.model_seconds = time.perf_counter() - started
            sequences = [span.sequence for span in batch.spans if span.samples]
            return self.sampler.pick(logits, sequences) if sequences else []

    def _context(self, spans: tuple[Span, ...]) -> StepContext:
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for span in spans:
            token_ids += span.sequence.token_ids[span.start : span.end]
            positions += range(span.start, span.end)
            if span.samples:
                logit_rows.append(len(token_ids) - 1)
        attend: Attend = StepAttention(self.kv_cache, self.backend, spans)
        decodes = all(span.num_tokens == 1 and span.samples for span in spans)
        return StepContext(self._ids(token_ids), self._ids(positions), self._ids(logit_rows), attend, decodes)

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.backend.device)


class StepAttention:
    """The `Attend` of one step: what does not depend on the layer is worked out once."""

    def __init__(self, kv_cache: KVCache, backend: Backend, spans: tuple[Span, ...]) -> None:
        self._kv_cache = kv_cache
        self._backend = backend
        self._written = torch.tensor(kv_cache.written_rows(spans), dtype=torch.int64, device=backend.device)
        self._runs = [kv_cache.runs(span) for span in spans]
        self._borders: list[tuple[int, int, int]] = []  # first row of the batch, number of tokens, position of the first
        first = 0
        for span in spans:
            self._borders.append((first, span.num_tokens, span.start))
            first += span.num_tokens

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """query [tokens, heads, head_dim]; key, value [tokens, kv_heads, head_dim]; result like query."""
        self._kv_cache.write(layer, self._written, key, value)
        segment = self._kv_cache.segment
        rows = [
            AttentionRow(*border, tuple(segment(layer, run) for run in runs))
            for border, runs in zip(self._borders, self._runs, strict=True)
        ]
        return self._backend.attention(query, rows, spec)
