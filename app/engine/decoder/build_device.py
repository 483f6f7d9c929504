"""Builds the decoder engine on a GPU: weights, KV pages, captured steps and warm-up.

`build.py` does the same for a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from app.backends.base import DeviceBackend
from app.backends.selection import select_device_backend
from app.engine.decoder.build import (
    KV_DTYPES,
    WARM_UP_TOKENS,
    engine_limits,
    kv_shape,
)
from app.engine.decoder.cuda_graphs import startup_shapes
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.loading import (
    ReportStage,
    load_on_device,
    percent_reporter,
)
from app.engine.scheduler.batch import (
    Batch,
    ScheduledSpan,
)
from app.engine.scheduler.budget import PrefillBudget
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.scheduler import Scheduler
from app.engine.scheduler.sequence import (
    Sequence,
    make_sequence,
)
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import (
    StepTimeTable,
    ThrottleCorrection,
)
from app.kernels.attention.layout import token_bytes
from app.kernels.attention.paged import PAGE_TOKENS
from app.messages import (
    Generate,
    SamplingParams,
)
from app.models.decoders.families import Decoder
from app.weights.checkpoint import Checkpoint

_LOG = logging.getLogger(__name__)
_WARM_UP_DECODES = 3  # decode steps of the warm-up, one for each sampling mode


@dataclass(frozen=True, slots=True)
class BuiltDeviceEngine:
    """A GPU decoder engine and the parts of it that benchmarks and `/info` read."""

    engine: DecoderEngine
    runner: DeviceDecoderRunner
    model: nn.Module
    kv_cache: PagedKvCache
    backend: DeviceBackend


def build_device_engine(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    eos_token_ids: Collection[int],
    report: ReportStage,
    step_times: StepTimeTable | None = None,
) -> BuiltDeviceEngine:
    """Load the weights, capture the common steps and warm up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
    model, backend = load_on_device(checkpoint, plan, report, select_device_backend)
    assert isinstance(model, Decoder), "a decoder's checkpoint"
    report("reserving KV memory")
    kv_cache = allocate_kv_pages(model, plan, backend)
    limits = engine_limits(plan)
    runner = DeviceDecoderRunner(model, kv_cache, backend, limits, "" if plan.compile.value else plan.compile.reason)
    capture_common_steps(runner, report)
    report("warming up")
    warm_up_device_decoder(runner, limits.max_batch_tokens)
    pool = KvSlots(kv_cache.shape.num_slots, kv_cache.capacity_tokens, kv_cache.tokens_per_page)
    prefill_budget = PrefillBudget(limits.max_batch_tokens, plan.itl_target_seconds.value, step_times)
    engine = DecoderEngine(Scheduler(pool, prefill_budget, limits, eos_token_ids), runner)
    engine.throttle_correction = ThrottleCorrection(plan.throttling_quota.value)
    engine.is_first = lambda: runner.is_first
    return BuiltDeviceEngine(engine, runner, model, kv_cache, backend)


def allocate_kv_pages(model: Decoder, plan: ServingPlan, backend: DeviceBackend) -> PagedKvCache:
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
        return PagedKvCache(shape, dtype, min(num_pages, most), backend.device)
    except RuntimeError as error:
        if not backend.recover_from_oom(error):
            raise
        raise PlanImpossible(
            f"The device no longer has {plan.kv_cache_bytes.value / 2**30:.1f} GiB free for keys and values ({error}). "
            "End the process that took its memory since the probe, or lower kv_cache_bytes."
        ) from error


def capture_common_steps(runner: DeviceDecoderRunner, report: ReportStage) -> None:
    """Capture the common steps until the graphs accept no more."""
    shapes = list(startup_shapes(runner.buckets))
    report_percent = percent_reporter(report, "capturing steps")
    for done, shape in enumerate(shapes, 1):
        if not runner.graphs.should_capture(shape):
            return
        runner.capture(shape)
        report_percent(done, len(shapes))


def warm_up_device_decoder(runner: DeviceDecoderRunner, max_batch_tokens: int) -> None:
    """Run prompts and decodes without the scheduler, so that the first client does not wait for kernel compilation.

    The KV memory that was written is released. The largest possible step is included: if it does not fit in device
    memory, this is logged at startup instead of failing a request later.
    """
    most = min(max_batch_tokens, runner.kv_cache.capacity_tokens, runner.kv_cache.shape.max_len) - _WARM_UP_DECODES
    _run_prompt_and_decodes(runner, max(1, min(WARM_UP_TOKENS, most)))
    while most > WARM_UP_TOKENS:
        try:
            _run_prompt_and_decodes(runner, most)
            return
        except RuntimeError as error:
            if not runner.survives(error):
                raise
            _LOG.warning(
                "A step of %d tokens needs more memory than the device has (%s); smaller steps are used.", most, error
            )
            most //= 2


def _run_prompt_and_decodes(runner: DeviceDecoderRunner, tokens: int) -> None:
    """Run a prompt in two parts, the second of at least one token, and then one decode for each sampling mode."""
    try:
        sequence, half = _warm_up_sequence(tokens, SamplingParams(temperature=0.0)), max(1, tokens - WARM_UP_TOKENS)
        for start, end in ((0, half), (half, tokens)):
            if start < end:
                runner.run(Batch((ScheduledSpan(sequence, start, end - start, 0, None, 0, samples=end == tokens),)))
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
            if tokens < runner.kv_cache.shape.max_len:
                decoding = _warm_up_sequence(tokens + 1, params)
                runner.run(Batch((ScheduledSpan(decoding, tokens, 1, 0, None, 0, samples=True),)))
    finally:
        runner.kv_cache.release(0, 0, runner.kv_cache.shape.max_len)


def _warm_up_sequence(length: int, params: SamplingParams) -> Sequence:
    return make_sequence(Generate("warm-up", (0,) * length, params, arrived_at=0.0), 0, frozenset())
