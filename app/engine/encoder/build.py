"""Builds the encoder engine on a CPU: backend, weights and warm-up, on the thread that will run its steps.

Builds the encoder engine on a GPU: weights, warm-up and recorded small batches.

`build_encoder.py` does the same for a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.backends.base import (
    DeviceBackend,
    HostBackend,
)
from app.backends.selection import (
    select_device_backend,
    select_host_backend,
)
from app.engine.encoder.batching import (
    BatchingDelay,
    EncodeState,
    TextSpan,
)
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.encoder.device_runner import DeviceEncoderRunner
from app.engine.encoder.engine import (
    EncoderEngine,
    EncoderLimits,
)
from app.engine.encoder.sharding import (
    DEFAULT_PAIR_TOKENS,
    LanePlanner,
)
from app.engine.loading import (
    ReportStage,
    load_on_device,
    percent_reporter,
)
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import (
    TABLE_TEXT_TOKENS,
    StepTimeTable,
    ThrottleCorrection,
)
from app.messages import (
    Encode,
    Text,
)
from app.models.encoders.encoder import Encoder
from app.weights.checkpoint import Checkpoint

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """A CPU encoder engine and the parts of it that benchmarks and `/info` read."""

    engine: EncoderEngine
    runner: EncoderRunner
    model: Encoder
    backend: HostBackend


def build_encoder_engine(
    checkpoint: Checkpoint, plan: ServingPlan, report: ReportStage, step_times: StepTimeTable | None = None
) -> BuiltEncoder:
    """Load the weights and warm up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
    model, backend = load_on_device(checkpoint, plan, report, select_host_backend)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    max_tokens = max(plan.max_batch_tokens.value, plan.max_model_len.value)
    planner = LanePlanner((step_times.pair_tokens if step_times else None) or DEFAULT_PAIR_TOKENS)
    off = "" if plan.compile.value else plan.compile.reason
    runner = EncoderRunner(model, max_tokens, off, plan.batch_target_tokens.value, planner)
    report("warming up")
    warm_up_encoder(runner, plan.max_model_len.value)
    limits = EncoderLimits(plan.max_model_len.value, plan.max_running_seqs.value, model.config.outputs)
    engine = EncoderEngine(runner, limits, BatchingDelay(plan.batch_target_tokens.value, step_times))
    engine.throttle_correction = ThrottleCorrection(plan.throttling_quota.value)
    return BuiltEncoder(engine, runner, model, backend)


def warm_up_encoder(runner: EncoderRunner, max_model_len: int) -> None:
    """Run one batch for each output, so that the first client does not pay for pools and recordings."""
    text = Text((0,) * min(WARM_UP_TOKENS, max_model_len))
    for output in runner.model.config.outputs:
        runner.run(EncodeState.from_message(Encode("warm-up", (text,), (output,), arrived_at=0.0)).spans())


@dataclass(frozen=True, slots=True)
class BuiltDeviceEncoder:
    """A GPU encoder engine and the parts of it that benchmarks and `/info` read."""

    engine: EncoderEngine
    runner: DeviceEncoderRunner
    model: Encoder
    backend: DeviceBackend


def build_device_encoder_engine(
    checkpoint: Checkpoint, plan: ServingPlan, report: ReportStage, step_times: StepTimeTable | None = None
) -> BuiltDeviceEncoder:
    """Load the weights, warm up and record small batches.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
    model, backend = load_on_device(checkpoint, plan, report, select_device_backend)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    max_tokens = max(plan.max_batch_tokens.value, plan.max_model_len.value)
    runner = DeviceEncoderRunner(model, backend, max_tokens, "" if plan.compile.value else plan.compile.reason)
    report("warming up")
    warm_up_device_encoder(runner, plan, report)
    limits = EncoderLimits(plan.max_model_len.value, plan.max_running_seqs.value, model.config.outputs)
    engine = EncoderEngine(runner, limits, BatchingDelay(plan.batch_target_tokens.value, step_times))
    return BuiltDeviceEncoder(engine, runner, model, backend)


def warm_up_device_encoder(runner: DeviceEncoderRunner, plan: ServingPlan, report: ReportStage) -> None:
    """Run batches without the engine: one for each output, one of the largest size, and one for each recorded shape.

    The first client then pays for no compilation. The full step runs before anything is recorded, so that
    recordings do not take the memory that it needs.
    """
    length, usual = plan.max_model_len.value, runner.model.config.outputs[0]
    for output in runner.model.config.outputs:
        runner.run(_warm_up_spans(output, min(WARM_UP_TOKENS, length)))
    each = min(TABLE_TEXT_TOKENS, length)
    number = min(plan.batch_target_tokens.value // each, plan.max_running_seqs.value)
    try:
        runner.run(_warm_up_spans(usual, each, max(number, 1)))
    except RuntimeError as error:
        # if it survives, the engine later makes smaller steps when a batch needs too much memory
        if not runner.survives(error):
            raise
    runner.record(_warm_up_spans(usual, 1), percent_reporter(report, "recording steps"))


def _warm_up_spans(output: str, length: int, number: int = 1) -> list[TextSpan]:
    """Return `number` texts of `length` tokens each."""
    texts = (Text((0,) * length),) * number
    return EncodeState.from_message(Encode("warm-up", texts, (output,), arrived_at=0.0)).spans()
