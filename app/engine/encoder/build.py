"""Builds the encoder engine: backend, weights, warm-up and, on a GPU, recordings of small batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.backends.selection import select_device_backend, select_host_backend
from app.engine.build import BuildRequest, BuiltEngine, ReportStage, load_on_device, percent_reporter
from app.engine.encoder.batching import BatchingDelay, EncodeState, TextSpan
from app.engine.encoder.cpu_runner import DEFAULT_PAIR_TOKENS, EncoderRunner, LanePlanner
from app.engine.encoder.engine import EncoderEngine, EncoderLimits, TextRunner, are_finite
from app.errors import StepFailed
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import TABLE_TEXT_TOKENS, ThrottleCorrection
from app.messages import Encode, Text
from app.models.encoders.encoder import Encoder
from app.weights.checkpoint import Checkpoint
from app.weights.tensor_reader import explaining_values_not_finite

if TYPE_CHECKING:
    from app.engine.encoder.device_runner import DeviceEncoderRunner

WARM_UP_TOKENS = 16


def build_encoder_engine(request: BuildRequest[Checkpoint]) -> BuiltEngine[EncoderEngine, EncoderRunner, Encoder]:
    """Load the weights on a CPU and warm up. Raises a `StartupError`."""
    plan, table = request.plan, request.step_time_model.table
    model, backend = load_on_device(request, select_host_backend)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    planner = LanePlanner((table.pair_tokens if table else None) or DEFAULT_PAIR_TOKENS)
    runner = EncoderRunner(model, max_step_tokens(plan), request.eager_reason, plan.memory.batch_target_tokens, planner)
    request.report("warming up")
    with explaining_values_not_finite(request.checkpoint):
        warm_up_encoder(runner, plan.memory.max_model_len)
    engine = _encoder_engine(request, runner, model, ThrottleCorrection(plan.cpu.throttling_quota))
    return BuiltEngine(engine, runner, model, backend)


def build_device_encoder_engine(
    request: BuildRequest[Checkpoint],
) -> BuiltEngine[EncoderEngine, DeviceEncoderRunner, Encoder]:
    """Load the weights on a GPU, warm up and record small batches. Raises a `StartupError`."""
    from app.engine.encoder.device_runner import DeviceEncoderRunner

    model, backend = load_on_device(request, select_device_backend)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    runner = DeviceEncoderRunner(model, backend, max_step_tokens(request.plan), request.eager_reason)
    request.report("warming up")
    with explaining_values_not_finite(request.checkpoint):
        warm_up_device_encoder(runner, request.plan, request.report)
    return BuiltEngine(_encoder_engine(request, runner, model), runner, model, backend)


def max_step_tokens(plan: ServingPlan) -> int:
    """Return the most tokens of a step: a text is never split."""
    return max(plan.memory.max_batch_tokens, plan.memory.max_model_len)


def _encoder_engine(
    request: BuildRequest[Checkpoint], runner: TextRunner, model: Encoder, correction: ThrottleCorrection | None = None
) -> EncoderEngine:
    plan = request.plan
    limits = EncoderLimits(plan.memory.max_model_len, plan.memory.max_running_seqs, model.config.outputs)
    delay = BatchingDelay(plan.memory.batch_target_tokens, request.step_time_model)
    return EncoderEngine(runner, limits, delay, throttle_correction=correction)


def warm_up_encoder(runner: EncoderRunner, max_model_len: int) -> None:
    """Run one batch for each output, so that the first client does not pay for pools and recordings."""
    text = Text((0,) * min(WARM_UP_TOKENS, max_model_len))
    for output in runner.model.config.outputs:
        spans = EncodeState.from_message(Encode("warm-up", (text,), (output,), arrived_at=0.0)).spans()
        _check_finite(runner.run(spans))


def warm_up_device_encoder(runner: DeviceEncoderRunner, plan: ServingPlan, report: ReportStage) -> None:
    """Run batches without the engine, so that no client pays for compilation.

    The full step runs before anything is recorded, so that recordings do not take the memory that it needs.
    """
    length, usual = plan.memory.max_model_len, runner.model.config.outputs[0]
    for output in runner.model.config.outputs:
        _check_finite(runner.run(_warm_up_spans(output, min(WARM_UP_TOKENS, length))))
    each = min(TABLE_TEXT_TOKENS, length)
    number = min(plan.memory.batch_target_tokens // each, plan.memory.max_running_seqs)
    try:
        runner.run(_warm_up_spans(usual, each, max(number, 1)))
    except RuntimeError as error:
        # if it survives, the engine later makes smaller steps when a batch needs too much memory
        if not runner.survives(error):
            raise
    runner.record(_warm_up_spans(usual, 1), percent_reporter(report, "recording steps"))


def _check_finite(texts: Sequence[Mapping[str, bytes]]) -> None:
    if not all(are_finite(rows) for text in texts for rows in text.values()):
        raise StepFailed("The outputs of the warm-up are not finite.")


def _warm_up_spans(output: str, length: int, number: int = 1) -> list[TextSpan]:
    texts = (Text((0,) * length),) * number
    return EncodeState.from_message(Encode("warm-up", texts, (output,), arrived_at=0.0)).spans()
