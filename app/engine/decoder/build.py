"""Builds the decoder engine: device, weights, KV memory, recorded or captured steps, and warm-up.

It runs on the thread that will run the steps. The modules for a GPU are imported only for a GPU.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from app.backends.base import DeviceBackend
from app.backends.selection import select_device_backend, select_host_backend
from app.engine.build import BuildRequest, BuiltEngine, ReportStage, load_on_device, percent_reporter
from app.engine.decoder.adapters import load_adapter_slots
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.draft_head import AssistantDrafts, AssistantRunner, HeadDrafts, HeadRunner
from app.engine.decoder.draft_model import DraftModel
from app.engine.decoder.engine import DecoderEngine, DecoderRunner
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_dtype, kv_shape_of
from app.engine.decoder.prompt_cache import open_prompt_cache
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Batch, ScheduledSpan, Sequence, make_sequence
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import MAX_DRAFT_TOKENS, MAX_SPECULATIVE_ROWS, Speculation, ngram_drafter
from app.errors import PlanImpossible, StepFailed
from app.hardware.plan.memory_budget import DRAFT_SEQS, STATE_ROWS, draft_kv_tokens, draft_precision
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import ThrottleCorrection
from app.messages import Generate, SamplingParams
from app.metrics.steps import StepTimeModel
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder
from app.models.decoders.draft_head import AssistantHead, DraftHead
from app.weights.checkpoint import Checkpoint
from app.weights.tensor_reader import explaining_values_not_finite
from armature_kernels.attention.attention import max_decode_queries, supports_heads, token_bytes
from armature_kernels.attention.paged import PAGE_TOKENS

if TYPE_CHECKING:
    from app.engine.decoder.device_runner import DeviceDecoderRunner
    from app.engine.decoder.paged_kv_cache import PagedKvCache

_LOG = logging.getLogger(__name__)
WARM_UP_TOKENS = 16
_MIN_CHECKPOINT_TOKENS, _MAX_CHECKPOINT_TOKENS = 128, 512
# Decodes of the warm-up on a GPU, all of one token: each sampling mode, for logits as computed and, by rules, in FP32.
_WARM_UP_SAMPLING = (
    *(SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)),
    *(SamplingParams(temperature=0.0, logprobs=1), SamplingParams(top_p=0.9, logprobs=1)),
)


def build_decoder_engine(
    request: BuildRequest[Checkpoint],
) -> BuiltEngine[DecoderEngine, CpuDecoderRunner, Decoder]:
    """Load the weights on a CPU, build the engine and warm it up. Raises a `StartupError`."""
    plan, config = request.plan, request.checkpoint.decoder
    model, backend = load_on_device(request, select_host_backend)
    assert isinstance(model, Decoder), "a decoder's checkpoint"
    request.report("reserving KV memory")
    kv_cache = KvCache(kv_shape(config, plan), kv_dtype(plan))
    replay = DecoderReplay(model, request.eager_reason)
    max_queries_together = deterministic_query_limit(config, plan)
    adapters = None if request.adapters is None else load_adapter_slots(model, request.adapters, request.report)
    runner = CpuDecoderRunner(replay, kv_cache, backend, Sampler(config.vocab_size), max_queries_together, adapters)
    request.report("warming up")
    with explaining_values_not_finite(request.checkpoint):
        warm_up_decoder(runner)
    capacity = min(plan.memory.kv_cache_bytes // kv_cache.bytes_per_token, kv_cache.shape.num_slots * kv_cache.stride)
    pool = KvSlots(
        kv_cache.shape.num_slots,
        capacity,
        kv_cache.tokens_per_page,
        checkpoints=state_checkpoints(kv_cache),
    )
    speculation = _speculation(config, plan, request.step_time_model)
    if speculation is not None and request.draft is not None:
        drafts = _load_draft_head if request.draft.decoder.is_draft_head else _load_draft_model
        speculation.set_draft_model(drafts(request, request.draft, runner))
    engine = _decoder_engine(request, runner, pool, speculation)
    engine.scheduler.prefix_store = open_prompt_cache(request, kv_cache, max_queries_together)
    engine.adapters = adapters
    return BuiltEngine(engine, runner, model, backend)


def build_device_decoder_engine(
    request: BuildRequest[Checkpoint],
) -> BuiltEngine[DecoderEngine, DeviceDecoderRunner, Decoder]:
    """Load the weights on a GPU, capture the common steps and warm up. Raises a `StartupError`."""
    plan = request.plan
    if len(plan.placement.rank_devices) > 1:
        from app.engine.decoder.tensor_parallel import end_with_ranks, lead

        runner = lead(request, plan.placement.rank_devices, select_device_backend, make_device_runner, end_with_ranks)
    else:
        model, backend = load_on_device(request, select_device_backend)
        assert isinstance(model, Decoder), "a decoder's checkpoint"
        runner = make_device_runner(request, model, backend)
    model, backend, kv_cache, limits = runner.model, runner.backend, runner.kv_cache, engine_limits(plan)
    speculation = _speculation(model.config, plan, request.step_time_model)
    adapters = None
    if request.adapters is not None:
        adapters = load_adapter_slots(model, request.adapters, request.report, backend.device)
        runner.use_adapters(adapters)
    capture_startup_steps(runner, request.report)
    request.report("warming up")
    with explaining_values_not_finite(request.checkpoint):
        warm_up_device_decoder(runner, limits.max_batch_tokens)
    pool = KvSlots(
        kv_cache.shape.num_slots,
        kv_cache.capacity_tokens,
        kv_cache.tokens_per_page,
        checkpoints=state_checkpoints(kv_cache),
    )
    engine = _decoder_engine(request, runner, pool, speculation)
    if plan.steps.prompt_cache is not None:
        from app.engine.decoder.host_prefixes import HostPrefixes

        store = HostPrefixes(
            kv_cache, request.step_time_model, plan.steps.prompt_cache_bytes, engine.scheduler.take_moves
        )
        engine.scheduler.prefix_store, pool.on_cut = store, store.spill
    engine.adapters = adapters
    return BuiltEngine(engine, runner, model, backend)


def make_device_runner(
    request: BuildRequest[Checkpoint], model: Decoder, backend: DeviceBackend
) -> DeviceDecoderRunner:
    """Return the runner of one GPU, with empty pages."""
    from app.engine.decoder.device_runner import DeviceDecoderRunner

    request.report("reserving KV memory")
    kv_cache = allocate_kv_pages(model, request.plan, backend)
    max_rows = MAX_SPECULATIVE_ROWS if request.plan.steps.speculation else 0
    return DeviceDecoderRunner(model, kv_cache, backend, engine_limits(request.plan), request.eager_reason, max_rows)


def _decoder_engine(
    request: BuildRequest[Checkpoint], runner: DecoderRunner, pool: KvSlots, speculation: Speculation | None = None
) -> DecoderEngine:
    plan, limits = request.plan, engine_limits(request.plan)
    prefill_budget = PrefillBudget(limits.max_batch_tokens, plan.steps.itl_target_seconds, request.step_time_model)
    scheduler = Scheduler(pool, prefill_budget, limits, request.eos_token_ids, speculation=speculation)
    return DecoderEngine(scheduler, runner, throttle_correction=ThrottleCorrection(plan.cpu.throttling_quota))


def deterministic_query_limit(config: ModelConfig, plan: ServingPlan) -> int | None:
    """Return how many queries attention may compute together; None, without `deterministic`, for the fastest choice."""
    if not plan.steps.deterministic:
        return None
    if not _has_native_attention(config):
        raise PlanImpossible(
            f"deterministic is on, but our attention has no kernel for {config.num_heads} heads of {config.head_dim} over "
            f"{config.num_kv_heads}, and torch's depends on what else is in the batch: leave it off."
        )
    return _max_decode_queries(config)


def _has_native_attention(config: ModelConfig) -> bool:
    return all(supports_heads(config.num_heads, one.num_kv_heads, one.head_dim) for one in config.head_kinds)


def _max_decode_queries(config: ModelConfig) -> int:
    return min(max_decode_queries(config.num_heads, one.num_kv_heads) for one in config.head_kinds)


def _speculation(config: ModelConfig, plan: ServingPlan, step_time_model: StepTimeModel) -> Speculation | None:
    """Return the speculation settings, or None if speculation is off.

    On a processor a sequence's queries, its draft tokens included, still use the kernel for few queries.
    """
    if not plan.steps.speculation:
        return None
    on_host = plan.placement.device == "cpu" and _has_native_attention(config)
    max_draft_tokens = _max_decode_queries(config) - 1 if on_host else MAX_DRAFT_TOKENS
    return Speculation(ngram_drafter, step_time_model, min(max_draft_tokens, MAX_DRAFT_TOKENS))


def _load_draft_head(request: BuildRequest[Checkpoint], draft: Checkpoint, runner: CpuDecoderRunner) -> HeadDrafts:
    plan, config = request.plan, draft.decoder
    request.report("loading the draft head")
    precision = draft_precision(plan.weights.precision, kv_dtype(plan).itemsize)
    own = plan.changed(precision=precision, int8_copy=False, keep_layers=())
    head, _ = load_on_device(BuildRequest(draft, own, request.report), select_host_backend)
    assert isinstance(head, DraftHead | AssistantHead), "a head's checkpoint"
    served = runner.model.model if isinstance(runner.model, DecoderReplay) else runner.model
    head.attach(served)
    length = plan.memory.max_model_len
    shape = kv_shape_of(config, min(DRAFT_SEQS, plan.memory.max_running_seqs), min(length, draft_kv_tokens(length)))
    own_cache, capacity = KvCache(shape, kv_dtype(plan)), draft_kv_tokens(length)
    drafts = (
        AssistantDrafts(AssistantRunner(head, own_cache, runner.backend, runner.kv_cache), capacity)
        if config.served_size
        else HeadDrafts(HeadRunner(head, own_cache, runner.backend), capacity)
    )
    runner.show_hidden = drafts.observe
    return drafts


def _load_draft_model(request: BuildRequest[Checkpoint], draft: Checkpoint, runner: CpuDecoderRunner) -> DraftModel:
    plan, config = request.plan, draft.decoder
    request.report("loading the draft model")
    length = min(plan.memory.max_model_len, config.max_model_len)
    precision = draft_precision(plan.weights.precision, kv_dtype(plan).itemsize)
    own = plan.changed(precision=precision, int8_copy=False, keep_layers=(), max_model_len=length)
    model, backend = load_on_device(BuildRequest(draft, own, request.report), select_host_backend)
    assert isinstance(model, Decoder), "a decoder's checkpoint"
    capacity = draft_kv_tokens(length)
    slots = min(DRAFT_SEQS, plan.memory.max_running_seqs)
    shape = kv_shape_of(config, slots, min(length, capacity), slots if config.state_sizes else 0)
    replay = DecoderReplay(model, request.eager_reason)
    own_runner = CpuDecoderRunner(replay, KvCache(shape, kv_dtype(plan)), backend, Sampler(config.vocab_size))
    with explaining_values_not_finite(draft):
        warm_up_decoder(own_runner)
    return DraftModel(own_runner, capacity, request.checkpoint.decoder.vocab_size)


def kv_shape(config: ModelConfig, plan: ServingPlan) -> KvShape:
    """Return the shape of the KV memory: two slots per running sequence, which may read a prefix from another slot.

    Recurrent states that the plan has room for beyond those of the slots are checkpoints.
    """
    slots, states = 2 * plan.memory.max_running_seqs, plan.memory.state_bytes // max(1, 4 * sum(config.state_sizes))
    each = STATE_ROWS[plan.placement.device]
    if config.state_sizes:  # one slot more than sequences run is for the prompt that beams share
        slots = max(plan.memory.max_running_seqs + 1, min(slots, states * 2 // (2 * each + 1)))
    return kv_shape_of(config, slots, plan.memory.max_model_len, max(0, states - each * slots))


def state_checkpoints(kv_cache: KvCache | PagedKvCache) -> StateCheckpoints | None:
    """Return the checkpoints of recurrent states, None without such states.

    Their interval is a power of two: at most as many tokens are computed again if a prefix ends between two of them. Beyond
    the least one, a state takes at most four times the memory of the keys and values of as many tokens.
    """
    if not kv_cache.states:
        return None
    shape = kv_cache.shape
    state_bytes, token_bytes = 4 * sum(shape.state_sizes), max(1, kv_cache.bytes_per_token)
    worth = max(1, state_bytes // (4 * token_bytes))
    interval = min(_MAX_CHECKPOINT_TOKENS, max(_MIN_CHECKPOINT_TOKENS, 2 ** (worth - 1).bit_length()))
    return StateCheckpoints(shape.num_slots, shape.num_checkpoints, interval, state_bytes)


def engine_limits(plan: ServingPlan) -> EngineLimits:
    return EngineLimits(plan.memory.max_model_len, plan.memory.max_running_seqs, plan.memory.max_batch_tokens)


def warm_up_decoder(runner: CpuDecoderRunner) -> None:
    """Run a prefill and a decode, so that no client pays for pools. Raises `StepFailed` if they are not finite."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    length = max(1, min(WARM_UP_TOKENS, runner.kv_cache.shape.max_len - 1))
    sequence = _warm_up_sequence(length, params)
    for start, num_tokens in ((0, length), (length, 1)):
        span = ScheduledSpan(sequence, start, num_tokens, slot=0, prefix_slot=None, prefix_tokens=0, samples=True)
        sequence.token_ids.extend(_run_warm_up(runner, span))
    runner.kv_cache.release(0, 0, runner.kv_cache.shape.max_len)


def allocate_kv_pages(model: Decoder, plan: ServingPlan, backend: DeviceBackend) -> PagedKvCache:
    """Allocate as many KV pages as the plan has bytes for, at most all slots' and one. Raises `PlanImpossible`."""
    from app.engine.decoder.paged_kv_cache import PagedKvCache

    shape, dtype = kv_shape(model.config, plan), kv_dtype(plan)
    page_bytes = PAGE_TOKENS * shape.num_layers * token_bytes(shape.num_kv_heads, shape.head_dim, dtype)
    num_pages = plan.memory.kv_cache_bytes // page_bytes - 1
    if num_pages < 1:
        raise PlanImpossible(
            f"kv_cache_bytes is {plan.memory.kv_cache_bytes:,}, but a page of {PAGE_TOKENS} tokens takes {page_bytes:,} on a device, "
            "and at least two pages are needed."
        )
    most = shape.num_slots * -(-shape.max_len // PAGE_TOKENS)
    try:
        return PagedKvCache(shape, dtype, min(num_pages, most), backend.device)
    except RuntimeError as error:
        if not backend.recover_from_oom(error):
            raise
        raise PlanImpossible(
            f"The device no longer has {plan.memory.kv_cache_bytes / 2**30:.1f} GiB free for keys and values ({error}). "
            "End the process that took its memory since the probe, or lower kv_cache_bytes."
        ) from error


def capture_startup_steps(runner: DeviceDecoderRunner, report: ReportStage) -> None:
    """Capture the common steps until the graphs accept no more."""
    shapes = list(runner.shapes.at_startup())
    report_percent = percent_reporter(report, "capturing steps")
    for done, shape in enumerate(shapes, 1):
        if not runner.graphs.should_capture(shape):
            return
        runner.capture(shape)
        report_percent(done, len(shapes))


def warm_up_device_decoder(runner: DeviceDecoderRunner, max_batch_tokens: int) -> None:
    """Run prompts and decodes on a GPU without the scheduler, so that no client waits for kernel compilation.

    A step of the largest size that does not fit in device memory is logged now, not a failed request later.
    """
    # One token is left for the decodes.
    most = min(max_batch_tokens, runner.kv_cache.capacity_tokens, runner.kv_cache.shape.max_len) - 1
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
    try:
        sequence, half = _warm_up_sequence(tokens, SamplingParams(temperature=0.0)), max(1, tokens - WARM_UP_TOKENS)
        for start, end in ((0, half), (half, tokens)):
            if start < end:
                _run_warm_up(runner, ScheduledSpan(sequence, start, end - start, 0, None, 0, samples=end == tokens))
        for params in _WARM_UP_SAMPLING:
            if tokens < runner.kv_cache.shape.max_len:
                decoding = _warm_up_sequence(tokens + 1, params)
                _run_warm_up(runner, ScheduledSpan(decoding, tokens, 1, 0, None, 0, samples=True))
    finally:
        runner.kv_cache.release(0, 0, runner.kv_cache.shape.max_len)


def _run_warm_up(runner: CpuDecoderRunner | DeviceDecoderRunner, span: ScheduledSpan) -> tuple[int, ...]:
    samples = runner.run(Batch((span,)))
    if not all(one.is_finite for one in samples):
        raise StepFailed("The logits of the warm-up are not finite.")
    return samples[0].token_ids if samples else ()


def _warm_up_sequence(length: int, params: SamplingParams) -> Sequence:
    return make_sequence(Generate("warm-up", (0,) * length, params, arrived_at=0.0), 0, frozenset())
