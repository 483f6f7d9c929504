"""The forward pass and the sampling of a device step, launched from an input block without waiting for results.

Nothing here depends on values that only the device knows, so a step can be captured and replayed with other
inputs.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.decoder.device_inputs import SamplingMode, StepSizes, StepViews
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.sampling.rows import SamplingTensors, sample_greedy, sample_random
from app.engine.scheduler.batch import ScheduledSpan
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext
from armature_kernels.attention.convolution import paged_convolve_torch
from armature_kernels.attention.paged import PagedStep
from armature_kernels.elementwise.rope import apply_rope_and_write_kv


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of a step that the host must know to launch kernels. `PagedStep` describes the fields."""

    num_decodes: int
    max_queries: int
    max_context: int
    fresh: bool = False

    @classmethod
    def of(cls, spans: abc.Sequence[ScheduledSpan]) -> StepBounds:
        """Return the bounds of these spans."""
        alone = [span.num_tokens == 1 for span in spans]
        num_decodes = alone.index(False) if False in alone else len(alone)
        max_queries, max_context = max(span.num_tokens for span in spans), max(span.end for span in spans)
        return cls(num_decodes, max_queries, max_context, all(span.start == 0 for span in spans[num_decodes:]))


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of one step over paged KV memory. It implements `Attend`."""

    kv_cache: PagedKvCache
    backend: DeviceBackend
    step: PagedStep
    kv_rows: Tensor

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Write the layer's keys and values, and return its attention output [tokens, heads * head_dim]."""
        kv = self.kv_cache.layers[layer].first_heads(heads.num_kv_heads)
        query = apply_rope_and_write_kv(heads, kv, self.kv_rows)
        if spec.filters is not None:
            return paged_convolve_torch(query, kv, self.step, spec.filters).flatten(1)
        return self.backend.attention(query, kv, self.step, spec).flatten(1)


class DeviceForward:
    """The model, the KV cache and the buffer of a device, from which steps are computed.

    `buffer` is an int64 tensor on the device that never moves: first the ids that steps sampled, then the input
    block.
    """

    def __init__(self, model: Decoder, kv_cache: PagedKvCache, backend: DeviceBackend, buffer: Tensor) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buffer = buffer

    def logits(self, views: StepViews[Tensor], sizes: StepSizes, bounds: StepBounds) -> Tensor:
        """Compute the logits [samples, vocab] from the inputs in these device views."""
        which = None if sizes.samples == sizes.tokens else views.logit_rows
        logits = self.model(self._context(views, bounds, which))
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def hidden(self, views: StepViews[Tensor], bounds: StepBounds) -> Tensor:
        """Compute the hidden states [tokens, size] of all tokens from the inputs in these device views."""
        return self.model.hidden(self._context(views, bounds, None))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Compute the logits [rows, vocab] of some rows of hidden states."""
        logits = self.model.logits(hidden)
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def _context(self, views: StepViews[Tensor], bounds: StepBounds, logit_rows: Tensor | None) -> StepContext:
        step = PagedStep(
            self.kv_cache.tables,
            views.slots,
            views.starts,
            views.lengths,
            bounds.num_decodes,
            bounds.max_queries,
            bounds.max_context,
            bounds.fresh,
        )
        # The previous step left -1 for a row whose logits were not finite. Waiting for that step raises.
        token_ids = self.buffer.index_select(0, views.sources).clamp_min_(0)
        attend = PagedAttention(self.kv_cache, self.backend, step, views.kv_rows)
        return StepContext(token_ids, views.positions, logit_rows, attend)

    def sample(self, logits: Tensor, views: StepViews[Tensor], mode: SamplingMode) -> None:
        """Sample each row of logits [samples, vocab] and write the ids to the buffer.

        The id is -1 if the row's logits are not finite.
        """
        if mode is SamplingMode.GREEDY:
            ids = sample_greedy(logits)
        else:
            sampling = SamplingTensors(views.columns, views.uniforms)
            ids = sample_random(logits, sampling, filtered=mode is SamplingMode.FILTERED)
        self.buffer[: len(ids)].copy_(ids)
