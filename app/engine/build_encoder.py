"""Builds the encoder engine on a CPU: backend, weights and warm-up, on the thread that will run its steps."""

from __future__ import annotations

from dataclasses import dataclass

from app.backends.base import Backend
from app.backends.selection import processor
from app.engine.encode_pace import EncodePace
from app.engine.encode_runner import EncodeRunner
from app.engine.encoder import EncodeLimits, EncoderEngine
from app.engine.lanes import USUAL_PAIR, Lanes
from app.engine.loading import Report, load
from app.engine.texts import Encoding
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.hardware.throttling import Stretch
from app.messages import Encode, Text
from app.models.encoder import Encoder
from app.weights.checkpoint import Checkpoint

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """A CPU encoder engine and the parts of it that benchmarks and `/info` read."""

    engine: EncoderEngine
    runner: EncodeRunner
    model: Encoder
    backend: Backend


def build_encoder(checkpoint: Checkpoint, plan: ServingPlan, report: Report, steps: StepSeconds | None = None) -> BuiltEncoder:
    """Load the weights and warm up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan cannot be served.
    """
    model, backend = load(checkpoint, plan, report, processor)
    assert isinstance(model, Encoder), "an encoder's checkpoint"
    room = max(plan.max_batch_tokens.value, plan.max_model_len.value)
    lanes = Lanes((steps.pair_tokens if steps else None) or USUAL_PAIR)
    off = "" if plan.compile.value else plan.compile.reason
    runner = EncodeRunner(model, room, off, plan.batch_target_tokens.value, lanes)
    report("warming up")
    warm_up(runner, plan.max_model_len.value)
    limits = EncodeLimits(plan.max_model_len.value, plan.max_running_seqs.value, model.config.outputs)
    engine = EncoderEngine(runner, limits, EncodePace(plan.batch_target_tokens.value, steps))
    engine.stretch = Stretch(plan.throttling_quota.value)
    return BuiltEncoder(engine, runner, model, backend)


def warm_up(runner: EncodeRunner, max_model_len: int) -> None:
    """Run one batch for each output, so that the first client does not pay for pools and recordings."""
    text = Text((0,) * min(WARM_UP_TOKENS, max_model_len))
    for output in runner.model.config.outputs:
        runner.run(Encoding.of(Encode("warm-up", (text,), (output,), arrived_at=0.0)).spans())
