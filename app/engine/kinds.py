"""Which engine serves which kind of checkpoint: one table, one function. Only the parts of the kind that is served are imported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

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
    return _BUILDERS[ordered.checkpoint.needs().kind](ordered)


def _decoder(ordered: Ordered) -> Engine:
    from app.engine.build import build_engine

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_engine(ordered.checkpoint, ordered.plan, ordered.eos_token_ids, ordered.report, ordered.steps).engine


def _encoder(ordered: Ordered) -> Engine:
    from app.engine.build_encoder import build_encoder

    assert isinstance(ordered.checkpoint, Checkpoint), "of its kind"
    return build_encoder(ordered.checkpoint, ordered.plan, ordered.report, ordered.steps).engine


def _program(ordered: Ordered) -> Engine:
    from app.engine.build_program import build_program

    assert isinstance(ordered.checkpoint, ProgramCheckpoint), "of its kind"
    return build_program(ordered.checkpoint, ordered.plan, ordered.report, ordered.steps)


_BUILDERS: Mapping[str, Callable[[Ordered], Engine]] = {"decoder": _decoder, "encoder": _encoder, "program": _program}
