"""The forward pass and the sampling of a device step, launched from an input block without waiting for results.

Nothing here depends on values that only the device knows, so a step can be captured and replayed with other
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.batch import Span
from app.engine.device_picking import Drawing, pick_drawn, pick_greedy
from app.engine.device_step import Sizes, StepViews, Way
from app.engine.paged_kv import PagedKVCache
from app.kernels.paged import PagedStep
from app.kernels.turn import Heads, turn
from app.models.context import AttentionSpec, StepContext
from app.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a step that the host must know to launch kernels. `PagedStep` describes the fields."""

    num_decodes: int
    most_queries: int
    most_context: int
    fresh: bool = False

    @classmethod
    def of(cls, spans: Items[Span]) -> Bounds:
        """Return the bounds of these spans."""
        alone = [span.num_tokens == 1 for span in spans]
        num_decodes = alone.index(False) if False in alone else len(alone)
        most_queries, most_context = max(span.num_tokens for span in spans), max(span.end for span in spans)
        return cls(num_decodes, most_queries, most_context, all(span.start == 0 for span in spans[num_decodes:]))


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The attention of one step over paged KV memory. It implements `Attend`."""

    kv_cache: PagedKVCache
    backend: DeviceBackend
    step: PagedStep
    written: Tensor

    def __call__(self, layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
        """Write the layer's keys and values, and return its attention output [tokens, heads * head_dim]."""
        kv = self.kv_cache.layers[layer]
        query = turn(heads, kv, self.written)
        return self.backend.attention(query, kv, self.step, spec).flatten(1)


class DeviceForward:
    """The model, the KV cache and the buffer of a device, from which steps are computed.

    `buffer` is an int64 tensor on the device that never moves: first the ids that steps sampled, then the input
    block.
    """

    def __init__(self, model: Decoder, kv_cache: PagedKVCache, backend: DeviceBackend, buffer: Tensor) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.buffer = buffer

    def logits(self, views: StepViews[Tensor], sizes: Sizes, bounds: Bounds) -> Tensor:
        """Compute the logits [samples, vocab] from the inputs in these device views."""
        step = PagedStep(
            self.kv_cache.tables,
            views.slots,
            views.starts,
            views.lengths,
            bounds.num_decodes,
            bounds.most_queries,
            bounds.most_context,
            bounds.fresh,
        )
        # The previous step left -1 for a row whose logits were not finite. Waiting for that step raises.
        token_ids = self.buffer.index_select(0, views.sources).clamp_min_(0)
        attend = PagedAttend(self.kv_cache, self.backend, step, views.written)
        which = None if sizes.picks == sizes.tokens else views.logit_rows
        logits = self.model(StepContext(token_ids, views.positions, which, attend))
        assert isinstance(logits, Tensor), "full logits were requested"
        return logits

    def pick(self, logits: Tensor, views: StepViews[Tensor], way: Way) -> None:
        """Sample each row of logits [samples, vocab] and write the ids to the buffer.

        The id is -1 if the row's logits are not finite.
        """
        if way is Way.GREEDY:
            ids = pick_greedy(logits)
        else:
            drawing = Drawing(views.temperature, views.top_k, views.top_p, views.min_p, views.uniforms)
            ids = pick_drawn(logits, drawing, filtered=way is Way.FILTERED)
        self.buffer[: len(ids)].copy_(ids)
