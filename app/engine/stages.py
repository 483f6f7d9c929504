"""Runs the steps of a decoder trial on a CPU: KV slots and a runner for batches.

`device_stage` does the same for other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from app.backends.base import Backend
from app.engine.batch import Batch
from app.engine.build import KV_DTYPES, few_queries
from app.engine.kv_cache import KVCache, KVShape
from app.engine.replay import Replay
from app.engine.runner import Runner
from app.engine.sampler import Sampler
from app.hardware.plan import ServingPlan
from app.models.config import ModelConfig
from app.models.decoder import Decoder

Run = Callable[[Batch], object]


class Stage(Protocol):
    """The KV memory for the models of a trial, which have few layers and share it."""

    bytes_per_token: int

    def runner(self, model: Decoder) -> Run:
        """Return a function that runs batches of this model, each to its end."""
        ...

    def remember(self, slot: int, num_tokens: int) -> None:
        """Write keys and values at the beginning of a slot.

        Memory that was never written would be read from a single page.
        """
        ...


class CpuStage:
    """The stage on a CPU, built as `build_engine` does it."""

    def __init__(self, backend: Backend, config: ModelConfig, plan: ServingPlan, shape: KVShape) -> None:
        self._backend, self._config, self._plan = backend, config, plan
        self._kv_cache = KVCache(shape, KV_DTYPES[plan.kv_precision.value])
        self.bytes_per_token = self._kv_cache.bytes_per_token

    def runner(self, model: Decoder) -> Run:
        """Return a function that runs batches of this model, recorded if the plan compiles."""
        off = "" if self._plan.compile.value else self._plan.compile.reason
        replay = Replay(model, off, seen_before=0)
        sampler, few = Sampler(self._config.vocab_size), few_queries(self._config, self._plan)
        return Runner(replay, self._kv_cache, self._backend, sampler, few).run

    def remember(self, slot: int, num_tokens: int) -> None:
        """Write random keys and values for the first `num_tokens` tokens of a slot."""
        some = some_heads(self._kv_cache.shape, num_tokens)
        rows = torch.arange(num_tokens) + self._kv_cache.row(slot, 0)
        for layer in range(self._kv_cache.shape.num_layers):
            self._kv_cache.write(layer, rows, some, some)


def some_heads(shape: KVShape, num_tokens: int) -> torch.Tensor:
    """Return random keys or values [tokens, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((num_tokens, shape.num_kv_heads, shape.head_dim), generator=generator)
