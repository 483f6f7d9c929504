"""Builds the engine of a checkpoint, selected by its kind (decoder, encoder, program) and by the device.

Only the modules of the kind that is served are imported.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Mapping,
)
from dataclasses import dataclass

from app.backends.selection import HOST_BACKENDS
from app.engine.loading import ReportStage
from app.engine.worker import Engine
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import StepTimeTable
from app.weights.checkpoint import Checkpoint
from app.weights.program import ProgramCheckpoint


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The inputs of `build`. `steps` is the measured step time table; `eos_token_ids` end the output of a decoder."""

    checkpoint: Checkpoint | ProgramCheckpoint
    plan: ServingPlan
    report: ReportStage
    steps: StepTimeTable | None = None
    eos_token_ids: Collection[int] = ()


def build(request: BuildRequest) -> Engine:
    """Build the engine on the thread that will run its steps. Raises a `StartupError` if the plan cannot be served."""
    return _BUILDERS[request.checkpoint.needs().kind, request.plan.device.value in HOST_BACKENDS](request)


def _decoder(request: BuildRequest) -> Engine:
    from app.engine.decoder.build import build_engine

    assert isinstance(request.checkpoint, Checkpoint), "of its kind"
    return build_engine(request.checkpoint, request.plan, request.eos_token_ids, request.report, request.steps).engine


def _encoder(request: BuildRequest) -> Engine:
    from app.engine.encoder.build import build_encoder_engine

    assert isinstance(request.checkpoint, Checkpoint), "of its kind"
    return build_encoder_engine(request.checkpoint, request.plan, request.report, request.steps).engine


def _device_decoder(request: BuildRequest) -> Engine:
    from app.engine.decoder.build_device import build_device_engine

    assert isinstance(request.checkpoint, Checkpoint), "of its kind"
    return build_device_engine(
        request.checkpoint, request.plan, request.eos_token_ids, request.report, request.steps
    ).engine


def _device_encoder(request: BuildRequest) -> Engine:
    from app.engine.encoder.build import build_device_encoder_engine

    assert isinstance(request.checkpoint, Checkpoint), "of its kind"
    return build_device_encoder_engine(request.checkpoint, request.plan, request.report, request.steps).engine


def _program(request: BuildRequest) -> Engine:
    from app.engine.program import build_program_engine

    assert isinstance(request.checkpoint, ProgramCheckpoint), "of its kind"
    return build_program_engine(request.checkpoint, request.plan, request.report, request.steps)


# Key: the kind, and True for a CPU. Programs are planned only for CPUs.
_BUILDERS: Mapping[tuple[str, bool], Callable[[BuildRequest], Engine]] = {
    ("decoder", True): _decoder,
    ("encoder", True): _encoder,
    ("program", True): _program,
    ("decoder", False): _device_decoder,
    ("encoder", False): _device_encoder,
}
