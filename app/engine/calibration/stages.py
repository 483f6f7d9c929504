"""The steps that a trial times, the part of the model that it builds for that, and the stage of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from app.backends.base import HostBackend
from app.engine.decoder.build import deterministic_query_limit
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_dtype
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Batch
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder
from armature_kernels.timing import MAX_ADJUSTMENT

COARSE_LAYERS, FULL_LAYERS = 8, 4  # one layer in this many is built
COARSE_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class TrialStep:
    """A step through `layers` layers: `size` decodes or `size` tokens of a prompt, after `context` tokens each.

    Kind `encode`: `size` tokens of texts that have `context` tokens each (0: as in the table).
    """

    kind: str
    size: int
    layers: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class TrialScope:
    """The part of a model that is built with synthetic weights.

    - `cache_bytes`: size of the largest cache, which the weights of a step must exceed.

    - `layers_share`: at least one layer in this many is built.

    - `most_outputs`: limit for the output layer; the rest of it is counted as layers.
    """

    cache_bytes: int
    layers_share: int
    most_outputs: int | None = None


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The steps of a trial: rows of decodes, tokens of a prompt and tokens of texts (empty: all that matter).

    `layers_share` and `most_outputs` limit the part of the model that is built. `context` adds steps with context.
    """

    layers_share: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()
    most_outputs: int | None = None
    context: bool = False


FULL_TRIAL = TrialShape(FULL_LAYERS, context=True)
COARSE_TRIAL = TrialShape(COARSE_LAYERS, rows=(1, 8), tokens=(128,), texts=(16, 256), most_outputs=COARSE_OUTPUTS)


class ModelTrial(Protocol):
    """A model under one plan that can be timed step by step."""

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        """Return the steps to time, the fastest first, since time may run out."""
        ...

    def step(self, shape: TrialStep) -> Callable[[], object]:
        """Return a function that runs that step; it may be called any number of times."""
        ...

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        """Return the result for the whole model, or None if steps are missing or their times are inconsistent.

        They are if times that rise with the size differ from them by more than `max_adjustment`, relative.
        """
        ...


def doubling_sizes(first: int, most: int) -> list[int]:
    """Return first, 2 · first, 4 · first, … and finally `most` itself."""
    return [*_powers(first, most), most]


def _powers(first: int, most: int) -> Iterator[int]:
    while first < most:
        yield first
        first *= 2


RunBatch = Callable[[Batch], object]


class TrialStage(Protocol):
    """The KV memory for the models of a trial, which have few layers and share it."""

    bytes_per_token: int

    def runner(self, model: Decoder) -> RunBatch: ...

    def fill_context(self, slot: int, num_tokens: int) -> None:
        """Write keys and values at the beginning of a slot: memory never written is read from a single page."""
        ...


class CpuTrialStage:
    """The stage on a CPU, built as `build_decoder_engine` does it."""

    def __init__(self, backend: HostBackend, config: ModelConfig, plan: ServingPlan, shape: KvShape) -> None:
        self._backend, self._config, self._plan = backend, config, plan
        self._kv_cache = KvCache(shape, kv_dtype(plan))
        self.bytes_per_token = self._kv_cache.bytes_per_token

    def runner(self, model: Decoder) -> RunBatch:
        off = "" if self._plan.steps.compile else self._plan.decisions["compile"].reason
        replay = DecoderReplay(model, off, record_after=0)
        sampler, few = Sampler(self._config.vocab_size), deterministic_query_limit(self._config, self._plan)
        return CpuDecoderRunner(replay, self._kv_cache, self._backend, sampler, few).run

    def fill_context(self, slot: int, num_tokens: int) -> None:
        """Write random keys and values for the first `num_tokens` tokens of a slot."""
        some = random_heads(self._kv_cache.shape, num_tokens)
        rows = torch.arange(num_tokens) + self._kv_cache.row(slot, 0)
        for layer in range(self._kv_cache.shape.num_layers):
            self._kv_cache.write(layer, rows, some, some)


def random_heads(shape: KvShape, num_tokens: int) -> torch.Tensor:
    """Return random keys or values [tokens, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((num_tokens, shape.num_kv_heads, shape.head_dim), generator=generator)
