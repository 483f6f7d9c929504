"""Which engine serves which kind of checkpoint, on a processor or on a device with memory of its own: one table, one function.

Only the parts of the kind that is served are imported.
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
    """What is to be built: `steps` is what steps were measured to take, `eos_token_ids` end what a decoder says."""

    checkpoint: Checkpoint | ProgramCheckpoint
    plan: ServingPlan
    report: Report
    steps: StepSeconds | None = None
    eos_token_ids: Collection[int] = ()


def build(ordered: Ordered) -> Engine:
    """On the thread that will step it. Raises a `StartupError` where the plan cannot be served."""
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


# By kind, and whether it is a processor that serves; programs are planned on no other.
_BUILDERS: Mapping[tuple[str, bool], Callable[[Ordered], Engine]] = {
    ("decoder", True): _decoder,
    ("encoder", True): _encoder,
    ("program", True): _program,
    ("decoder", False): _device_decoder,
    ("encoder", False): _device_encoder,
}
