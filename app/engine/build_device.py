"""From a decoder's checkpoint and a plan to an engine that steps on a device with memory of its own: weights, pages, captured steps,
warm-up. What a processor does instead is `build.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from app.backends.base import DeviceBackend
from app.backends.selection import device_backend
from app.engine.batch import Batch, Span
from app.engine.build import KV_DTYPES, WARM_UP_TOKENS, kv_shape, limits_of
from app.engine.decoder import DecoderEngine
from app.engine.device_runner import DeviceRunner
from app.engine.graphs import common_shapes
from app.engine.loading import Report, load, percent
from app.engine.pace import StepPace
from app.engine.paged_kv import PagedKVCache
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence, sequence_of
from app.engine.slots import SlotPool
from app.errors import PlanImpossible
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.hardware.throttling import Stretch
from app.kernels.kv_rows import token_bytes
from app.kernels.paged import PAGE_TOKENS
from app.messages import Generate, SamplingParams
from app.models.decoder import Decoder
from app.weights.checkpoint import Checkpoint

_LOG = logging.getLogger(__name__)
_DECODES = 3  # of the warm-up: each as another way to pick wants it


@dataclass(frozen=True, slots=True)
class BuiltDevice:
    """An engine with the parts that benches and `/info` look at."""

    engine: DecoderEngine
    runner: DeviceRunner
    model: nn.Module
    kv_cache: PagedKVCache
    backend: DeviceBackend


def build_device(
    checkpoint: Checkpoint, plan: ServingPlan, eos_token_ids: Collection[int], report: Report, steps: StepSeconds | None = None
) -> BuiltDevice:
    """Loads, captures and warms up; `steps`: what steps were measured to take. Raises a `StartupError` where the plan cannot be served."""
    model, backend = load(checkpoint, plan, report, device_backend)
    assert isinstance(model, Decoder), "a decoder's checkpoint"
    report("reserving KV memory")
    kv_cache = pages_of(model, plan, backend)
    limits = limits_of(plan)
    runner = DeviceRunner(model, kv_cache, backend, limits, "" if plan.compile.value else plan.compile.reason)
    capture(runner, report)
    report("warming up")
    warm_up(runner, limits.max_batch_tokens)
    pool = SlotPool(kv_cache.shape.num_slots, kv_cache.capacity_tokens, kv_cache.tokens_per_page)
    pace = StepPace(limits.max_batch_tokens, plan.itl_target_seconds.value, steps)
    engine = DecoderEngine(Scheduler(pool, pace, limits, eos_token_ids), runner)
    engine.stretch = Stretch(plan.throttling_quota.value)
    engine.is_first = lambda: runner.is_first
    return BuiltDevice(engine, runner, model, kv_cache, backend)


def pages_of(model: Decoder, plan: ServingPlan, backend: DeviceBackend) -> PagedKVCache:
    """As many pages as the plan has bytes for, nobody's among them; no more than all slots could fill."""
    shape, dtype = kv_shape(model.config, plan), KV_DTYPES[plan.kv_precision.value]
    page_bytes = PAGE_TOKENS * shape.num_layers * token_bytes(shape.num_kv_heads, shape.head_dim, dtype)
    num_pages = plan.kv_cache_bytes.value // page_bytes - 1
    if num_pages < 1:
        raise PlanImpossible(
            f"kv_cache_bytes is {plan.kv_cache_bytes.value:,}, but a page of {PAGE_TOKENS} tokens takes {page_bytes:,} on a device, "
            "and it takes two to begin with."
        )
    most = shape.num_slots * -(-shape.max_len // PAGE_TOKENS)
    try:
        return PagedKVCache(shape, dtype, min(num_pages, most), backend.device)
    except RuntimeError as error:
        if not backend.survives(error):
            raise
        raise PlanImpossible(
            f"The device has no room for {plan.kv_cache_bytes.value / 2**30:.1f} GiB of keys and values any more ({error}). "
            "Whatever else took its memory since it was looked at: end that, or lower kv_cache_bytes."
        ) from error


def capture(runner: DeviceRunner, report: Report) -> None:
    """The common steps, until there is a reason to capture no more."""
    shapes = list(common_shapes(runner.buckets))
    told = percent(report, "capturing steps")
    for done, shape in enumerate(shapes, 1):
        if not runner.graphs.wants(shape):
            return
        runner.capture(shape)
        told(done, len(shapes))


def warm_up(runner: DeviceRunner, max_batch_tokens: int) -> None:
    """Prompts and decodes beside the scheduler, so that the first client pays for no kernel's making; what they wrote is given back.

    The largest step there may be is among them: where it does not fit the device's memory that is known now, and told.
    """
    most = min(max_batch_tokens, runner.kv_cache.capacity_tokens, runner.kv_cache.shape.max_len) - _DECODES
    _read(runner, max(1, min(WARM_UP_TOKENS, most)))
    while most > WARM_UP_TOKENS:
        try:
            _read(runner, most)
            return
        except RuntimeError as error:
            if not runner.survives(error):
                raise
            _LOG.warning("A step of %d tokens wants more memory than the device has (%s): smaller ones serve.", most, error)
            most //= 2


def _read(runner: DeviceRunner, tokens: int) -> None:
    """A prompt in two parts, the second of one token or more behind the first; then tokens picked in each way."""
    try:
        sequence, half = _sequence(tokens, SamplingParams(temperature=0.0)), max(1, tokens - WARM_UP_TOKENS)
        for start, end in ((0, half), (half, tokens)):
            if start < end:
                runner.run(Batch((Span(sequence, start, end - start, 0, None, 0, samples=end == tokens),)))
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
            if tokens < runner.kv_cache.shape.max_len:
                decoding = _sequence(tokens + 1, params)
                runner.run(Batch((Span(decoding, tokens, 1, 0, None, 0, samples=True),)))
    finally:
        runner.kv_cache.release(0, 0, runner.kv_cache.shape.max_len)


def _sequence(length: int, params: SamplingParams) -> Sequence:
    return sequence_of(Generate("warm-up", (0,) * length, params, arrived_at=0.0), 0, frozenset())
