"""Builds the decoder engine on a CPU: backend, weights, KV memory and warm-up, on the thread that will run its steps.

Serving and `armature bench engine` use the same function, so the benchmark measures the engine that is served.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Mapping,
)
from dataclasses import dataclass

import torch
from torch import nn

from app.backends.base import HostBackend
from app.backends.selection import select_host_backend
from app.engine.decoder.cpu_runner import (
    CpuDecoderRunner,
    DecoderReplay,
)
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import (
    KvCache,
    KvShape,
)
from app.engine.loading import (
    ReportStage,
    load_on_device,
)
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import (
    Batch,
    ScheduledSpan,
)
from app.engine.scheduler.budget import PrefillBudget
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.queues import EngineLimits
from app.engine.scheduler.scheduler import Scheduler
from app.engine.scheduler.sequence import make_sequence
from app.engine.scheduler.speculation import (
    MAX_DRAFT_TOKENS,
    DecodeCosts,
    NgramDrafter,
    Speculation,
)
from app.errors import PlanImpossible
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import (
    StepTimeTable,
    ThrottleCorrection,
)
from app.kernels.attention.attention import (
    max_decode_queries,
    supports_heads,
)
from app.messages import (
    Generate,
    SamplingParams,
)
from app.models.decoders.config import ModelConfig
from app.models.decoders.families import Decoder
from app.weights.checkpoint import Checkpoint

KV_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
}
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A decoder engine and the parts of it that benchmarks and `/info` read."""

    engine: DecoderEngine
    runner: CpuDecoderRunner
    model: nn.Module
    kv_cache: KvCache
    backend: HostBackend


def build_engine(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    eos_token_ids: Collection[int],
    report: ReportStage,
    step_times: StepTimeTable | None = None,
) -> BuiltEngine:
    """Load the weights, build the engine and warm it up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
    model, backend = load_on_device(checkpoint, plan, report, select_host_backend)
    assert isinstance(model, Decoder), "a decoder's checkpoint"
    report("reserving KV memory")
    config = checkpoint.decoder
    kv_cache = KvCache(kv_shape(config, plan), KV_DTYPES[plan.kv_precision.value])
    replay = DecoderReplay(model, "" if plan.compile.value else plan.compile.reason)
    runner = CpuDecoderRunner(
        replay, kv_cache, backend, Sampler(config.vocab_size), deterministic_query_limit(config, plan)
    )
    report("warming up")
    warm_up_decoder(runner)
    prefill_budget = PrefillBudget(plan.max_batch_tokens.value, plan.itl_target_seconds.value, step_times)
    capacity = min(plan.kv_cache_bytes.value // kv_cache.bytes_per_token, kv_cache.shape.num_slots * kv_cache.stride)
    pool = KvSlots(kv_cache.shape.num_slots, capacity, kv_cache.tokens_per_page)
    scheduler = Scheduler(pool, prefill_budget, engine_limits(plan), eos_token_ids)
    scheduler.speculation = _speculation(config, plan, step_times)
    engine = DecoderEngine(scheduler, runner)
    engine.throttle_correction = ThrottleCorrection(plan.throttling_quota.value)
    engine.is_first = lambda: replay.is_first
    return BuiltEngine(engine, runner, model, kv_cache, backend)


def deterministic_query_limit(config: ModelConfig, plan: ServingPlan) -> int | None:
    """Return how many queries of a sequence attention may compute together, or None for the fastest choice.

    A limit is set only for `deterministic`, where a result must not depend on the other rows of the batch.
    """
    if not plan.deterministic.value:
        return None
    if not supports_heads(config.num_heads, config.num_kv_heads, config.head_dim):
        raise PlanImpossible(
            f"deterministic is on, but our attention has no kernel for {config.num_heads} heads of {config.head_dim} over "
            f"{config.num_kv_heads}, and torch's depends on what else is in the batch: leave it off."
        )
    return max_decode_queries(config.num_heads, config.num_kv_heads)


def _speculation(config: ModelConfig, plan: ServingPlan, step_times: StepTimeTable | None) -> Speculation | None:
    """Return the speculation settings, or None if speculation is off.

    The number of draft tokens is limited so that a sequence's queries still use the kernel for few queries. A step
    with draft tokens never uses the kernel for prompts.
    """
    if not plan.speculation.value:
        return None
    native = supports_heads(config.num_heads, config.num_kv_heads, config.head_dim)
    max_draft_tokens = max_decode_queries(config.num_heads, config.num_kv_heads) - 1 if native else MAX_DRAFT_TOKENS
    return Speculation(
        lambda sequence: NgramDrafter(), DecodeCosts(step_times), min(max_draft_tokens, MAX_DRAFT_TOKENS)
    )


def kv_shape(config: ModelConfig, plan: ServingPlan) -> KvShape:
    """Return the shape of the KV memory, with two slots for each sequence that may run.

    Each sequence owns one slot, and may also read a prefix from the slot of another one.
    """
    return KvShape(
        num_layers=config.num_layers,
        num_slots=2 * plan.max_running_seqs.value,
        max_len=plan.max_model_len.value,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def engine_limits(plan: ServingPlan) -> EngineLimits:
    """Return the engine limits that the plan sets."""
    return EngineLimits(plan.max_model_len.value, plan.max_running_seqs.value, plan.max_batch_tokens.value)


def warm_up_decoder(runner: CpuDecoderRunner) -> None:
    """Run one prefill and one decode without the scheduler.

    The first client then does not pay for pools and code generation. The KV memory that was written is released.
    The prefill budget never sees these steps.
    """
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    length = max(1, min(WARM_UP_TOKENS, runner.kv_cache.shape.max_len - 1))
    sequence = make_sequence(Generate("warm-up", (0,) * length, params, arrived_at=0.0), 0, frozenset())
    for start, num_tokens in ((0, length), (length, 1)):
        span = ScheduledSpan(sequence, start, num_tokens, slot=0, prefix_slot=None, prefix_tokens=0, samples=True)
        (sampled,) = runner.run(Batch((span,)))
        sequence.token_ids.extend(sampled.token_ids)
    runner.kv_cache.release(0, 0, runner.kv_cache.shape.max_len)
