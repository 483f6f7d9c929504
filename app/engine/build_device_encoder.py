"""From an encoder's checkpoint and a plan to an engine that steps on a device with memory of its own: weights, warm-up, small batches
recorded. What a processor does instead is `build_encoder`'s."""

from __future__ import annotations

from dataclasses import dataclass

from app.backends.base import DeviceBackend
from app.backends.selection import device_backend
from app.engine.build_encoder import WARM_UP_TOKENS
from app.engine.encode_device import DeviceEncodeRunner
from app.engine.encode_pace import EncodePace
from app.engine.encoder import EncodeLimits, EncoderEngine
from app.engine.loading import Report, load, percent
from app.engine.texts import Encoding, TextSpan
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import TABLE_TEXT_TOKENS, StepSeconds
from app.messages import Encode, Text
from app.models.encoder import Encoder
from app.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class BuiltDeviceEncoder:
    """An engine with the parts that benches and `/info` look at."""

    engine: EncoderEngine
    runner: DeviceEncodeRunner
    model: Encoder
    backend: DeviceBackend


def build_device_encoder(
    checkpoint: Checkpoint, plan: ServingPlan, report: Report, steps: StepSeconds | None = None
) -> BuiltDeviceEncoder:
    """Loads, warms up and records; `steps` is what steps were measured to take. Raises a `StartupError` where the plan cannot be served."""
    model, backend = load(checkpoint, plan, report, device_backend)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    room = max(plan.max_batch_tokens.value, plan.max_model_len.value)
    runner = DeviceEncodeRunner(model, backend, room, "" if plan.compile.value else plan.compile.reason)
    report("warming up")
    warm_up(runner, plan, report)
    limits = EncodeLimits(plan.max_model_len.value, plan.max_running_seqs.value, model.config.outputs)
    engine = EncoderEngine(runner, limits, EncodePace(plan.batch_target_tokens.value, steps))
    return BuiltDeviceEncoder(engine, runner, model, backend)


def warm_up(runner: DeviceEncodeRunner, plan: ServingPlan, report: Report) -> None:
    """Batches beside the engine: one for each output, one of the largest, one for each shape that is recorded. The first client pays for
    nothing, and what a full step wants of memory is not taken by what is recorded."""
    length, usual = plan.max_model_len.value, runner.model.config.outputs[0]
    for output in runner.model.config.outputs:
        runner.run(_spans(output, min(WARM_UP_TOKENS, length)))
    each = min(TABLE_TEXT_TOKENS, length)
    number = min(plan.batch_target_tokens.value // each, plan.max_running_seqs.value)
    try:
        runner.run(_spans(usual, each, max(number, 1)))
    except RuntimeError as error:
        if not runner.survives(error):  # else the engine makes smaller steps of those that want too much
            raise
    runner.record(_spans(usual, 1), percent(report, "recording steps"))


def _spans(output: str, length: int, number: int = 1) -> list[TextSpan]:
    """Texts of so many tokens each."""
    texts = (Text((0,) * length),) * number
    return Encoding.of(Encode("warm-up", texts, (output,), arrived_at=0.0)).spans()
