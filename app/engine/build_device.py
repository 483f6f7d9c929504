"""Builds the decoder engine on a GPU: weights, KV pages, captured steps and warm-up.

`build.py` does the same for a CPU.
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
_DECODES = 3  # decode steps of the warm-up, one for each sampling mode


@dataclass(frozen=True, slots=True)
class BuiltDevice:
    """A GPU decoder engine and the parts of it that benchmarks and `/info` read."""

    engine: DecoderEngine
    runner: DeviceRunner
    model: nn.Module
    kv_cache: PagedKVCache
    backend: DeviceBackend


def build_device(
    checkpoint: Checkpoint, plan: ServingPlan, eos_token_ids: Collection[int], report: Report, steps: StepSeconds | None = None
) -> BuiltDevice:
    """Load the weights, capture the common steps and warm up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
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
    """Allocate as many KV pages as the plan has bytes for, but no more than all slots can fill.

    One page is reserved: it belongs to no sequence. Raises `PlanImpossible` if the pages do not fit.
    """
    shape, dtype = kv_shape(model.config, plan), KV_DTYPES[plan.kv_precision.value]
    page_bytes = PAGE_TOKENS * shape.num_layers * token_bytes(shape.num_kv_heads, shape.head_dim, dtype)
    num_pages = plan.kv_cache_bytes.value // page_bytes - 1
    if num_pages < 1:
        raise PlanImpossible(
            f"kv_cache_bytes is {plan.kv_cache_bytes.value:,}, but a page of {PAGE_TOKENS} tokens takes {page_bytes:,} on a device, "
            "and at least two pages are needed."
        )
    most = shape.num_slots * -(-shape.max_len // PAGE_TOKENS)
    try:
        return PagedKVCache(shape, dtype, min(num_pages, most), backend.device)
    except RuntimeError as error:
        if not backend.survives(error):
            raise
        raise PlanImpossible(
            f"The device no longer has {plan.kv_cache_bytes.value / 2**30:.1f} GiB free for keys and values ({error}). "
            "End the process that took its memory since the probe, or lower kv_cache_bytes."
        ) from error


def capture(runner: DeviceRunner, report: Report) -> None:
    """Capture the common steps until the graphs accept no more."""
    shapes = list(common_shapes(runner.buckets))
    told = percent(report, "capturing steps")
    for done, shape in enumerate(shapes, 1):
        if not runner.graphs.wants(shape):
            return
        runner.capture(shape)
        told(done, len(shapes))


def warm_up(runner: DeviceRunner, max_batch_tokens: int) -> None:
    """Run prompts and decodes without the scheduler, so that the first client does not wait for kernel compilation.

    The KV memory that was written is released. The largest possible step is included: if it does not fit in device
    memory, this is logged at startup instead of failing a request later.
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
            _LOG.warning("A step of %d tokens needs more memory than the device has (%s); smaller steps are used.", most, error)
            most //= 2


def _read(runner: DeviceRunner, tokens: int) -> None:
    """Run a prompt in two parts, the second of at least one token, and then one decode for each sampling mode."""
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
