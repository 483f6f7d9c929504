"""Builds the engine of a checkpoint, selected by its kind (decoder, encoder, program) and by the device.

Only the modules of the kind that is served are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from app.backends.selection import PROCESSORS
from app.engine.loading import Report
from app.engine.worker import Engine
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.weights.checkpoint import Checkpoint
from app.weights.program import ProgramCheckpoint


@dataclass(frozen=True, slots=True)
class Ordered:
    """The inputs of `build`. `steps` is the measured step time table; `eos_token_ids` end the output of a decoder."""

    checkpoint: Checkpoint | ProgramCheckpoint
    plan: ServingPlan
    report: Report
    steps: StepSeconds | None = None
    eos_token_ids: Collection[int] = ()


def build(ordered: Ordered) -> Engine:
    """Build the engine on the thread that will run its steps. Raises a `StartupError` if the plan cannot be served."""
    return _BUILDERS[ordered.checkpoint.needs().kind, ordered.plan.device.value in PROCESSORS](ordered)


def _decoder(ordered: Ordered) -> Engine:
    from app.engine.build import build_engine

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_engine(ordered.checkpoint, ordered.plan, ordered.eos_token_ids, ordered.report, ordered.steps).engine


def _encoder(ordered: Ordered) -> Engine:
    from app.engine.build_encoder import build_encoder

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_encoder(ordered.checkpoint, ordered.plan, ordered.report, ordered.steps).engine


def _device_decoder(ordered: Ordered) -> Engine:
    from app.engine.build_device import build_device

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_device(ordered.checkpoint, ordered.plan, ordered.eos_token_ids, ordered.report, ordered.steps).engine


def _device_encoder(ordered: Ordered) -> Engine:
    from app.engine.build_device_encoder import build_device_encoder

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_device_encoder(ordered.checkpoint, ordered.plan, ordered.report, ordered.steps).engine


def _program(ordered: Ordered) -> Engine:
    from app.engine.build_program import build_program

    assert isinstance(ordered.checkpoint, ProgramCheckpoint), "of its kind"
    return build_program(ordered.checkpoint, ordered.plan, ordered.report, ordered.steps)


# Key: the kind, and True for a CPU. Programs are planned only for CPUs.
_BUILDERS: Mapping[tuple[str, bool], Callable[[Ordered], Engine]] = {
    ("decoder", True): _decoder,
    ("encoder", True): _encoder,
    ("program", True): _program,
    ("decoder", False): _device_decoder,
    ("encoder", False): _device_encoder,
}
