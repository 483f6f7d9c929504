"""Builds the encoder engine on a GPU: weights, warm-up and recorded small batches.

`build_encoder.py` does the same for a CPU.
"""

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
    """A GPU encoder engine and the parts of it that benchmarks and `/info` read."""

    engine: EncoderEngine
    runner: DeviceEncodeRunner
    model: Encoder
    backend: DeviceBackend


def build_device_encoder(
    checkpoint: Checkpoint, plan: ServingPlan, report: Report, steps: StepSeconds | None = None
) -> BuiltDeviceEncoder:
    """Load the weights, warm up and record small batches.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
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
    """Run batches without the engine: one for each output, one of the largest size, and one for each recorded shape.

    The first client then pays for no compilation. The full step runs before anything is recorded, so that
    recordings do not take the memory that it needs.
    """
    length, usual = plan.max_model_len.value, runner.model.config.outputs[0]
    for output in runner.model.config.outputs:
        runner.run(_spans(output, min(WARM_UP_TOKENS, length)))
    each = min(TABLE_TEXT_TOKENS, length)
    number = min(plan.batch_target_tokens.value // each, plan.max_running_seqs.value)
    try:
        runner.run(_spans(usual, each, max(number, 1)))
    except RuntimeError as error:
        # if it survives, the engine later makes smaller steps when a batch needs too much memory
        if not runner.survives(error):
            raise
    runner.record(_spans(usual, 1), percent(report, "recording steps"))


def _spans(output: str, length: int, number: int = 1) -> list[TextSpan]:
    """Return `number` texts of `length` tokens each."""
    texts = (Text((0,) * length),) * number
    return Encoding.of(Encode("warm-up", texts, (output,), arrived_at=0.0)).spans()
