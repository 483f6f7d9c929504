"""Device resources for trial steps: paged KV memory and the runners that serving uses."""

from __future__ import annotations

import torch

from app.backends.base import DeviceBackend
from app.engine.batch import Span
from app.engine.build import KV_DTYPES
from app.engine.device_runner import DeviceRunner
from app.engine.encode_device import DeviceEncodeRunner
from app.engine.encode_rehearsal import MakeRun, RunTexts
from app.engine.kv_cache import KVShape
from app.engine.limits import Limits
from app.engine.paged_kv import PagedKVCache
from app.engine.sequence import sequence_of
from app.engine.stages import Run, some_heads
from app.engine.texts import Encoding
from app.hardware.plan import ServingPlan
from app.kernels.paged import PAGE_TOKENS
from app.messages import Encode, Generate, SamplingParams, Text
from app.models.config import ModelConfig
from app.models.decoder import Decoder
from app.models.encoder import Encoder

_LONG_SLOTS = 9  # slots that hold a context or a long prompt, each at full length; the other slots hold one token


class DeviceStage:
    """The resources that trial steps of a decoder need on a device, created as `build_device` does.

    The KV cache has only as many pages as trial steps write.
    """

    def __init__(self, backend: DeviceBackend, config: ModelConfig, plan: ServingPlan, shape: KVShape) -> None:
        self._backend, self._plan = backend, plan
        pages = shape.num_slots + _LONG_SLOTS * -(-shape.max_len // PAGE_TOKENS)
        self._kv_cache = PagedKVCache(shape, KV_DTYPES[plan.kv_precision.value], pages, backend.device)
        self.bytes_per_token = self._kv_cache.bytes_per_token

    def runner(self, model: Decoder) -> Run:
        """Return the function that computes batches with this model."""
        limits = Limits(self._kv_cache.shape.max_len, self._kv_cache.shape.num_slots, self._plan.max_batch_tokens.value)
        return DeviceRunner(
            model, self._kv_cache, self._backend, limits, "" if self._plan.compile.value else self._plan.compile.reason
        ).run

    def remember(self, slot: int, num_tokens: int) -> None:
        """Fill a slot with synthetic keys and values for `num_tokens` tokens of context."""
        request = Generate(f"remembered-{slot}", (0,) * num_tokens, SamplingParams(max_tokens=1), arrived_at=0.0)
        sequence = sequence_of(request, 0, frozenset())
        span = Span(sequence, 0, num_tokens, slot=slot, prefix_slot=None, prefix_tokens=0, samples=False)
        rows = torch.tensor(self._kv_cache.written_rows((span,)), device=self._backend.device)
        some = some_heads(self._kv_cache.shape, num_tokens).to(self._backend.device)
        for layer in range(self._kv_cache.shape.num_layers):
            self._kv_cache.write(layer, rows, some, some)


def texts_on(backend: DeviceBackend, plan: ServingPlan) -> MakeRun:
    """Return the factory of trial runners for encoder texts on this device, created as `build_device_encoder` does."""

    def make(model: Encoder, room: int) -> RunTexts:
        runner = DeviceEncodeRunner(model, backend, room, "" if plan.compile.value else plan.compile.reason)
        if plan.compile.value:
            one = Encode("rehearsal", (Text((0,)),), model.config.outputs[:1], arrived_at=0.0)
            runner.record(Encoding.of(one).spans())
        return runner.run

    return make
