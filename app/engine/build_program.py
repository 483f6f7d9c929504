"""Builds the engine of an exported program: weights, a check that rows are independent, and warm-up."""

from __future__ import annotations

import torch
from torch import Tensor

from app.backends.selection import processor
from app.engine.encode_pace import EncodePace
from app.engine.loading import Report, percent, prepared_device
from app.engine.program import FAILURES, ProgramEngine, Served
from app.engine.tensors import made_up
from app.errors import CheckpointInvalid
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.hardware.throttling import Stretch
from app.models.program import Program
from app.weights.load_program import load_program
from app.weights.program import ProgramCheckpoint

_CLOSE = 0.05  # relative to the largest value, since products round differently for another number of rows


def build_program(
    checkpoint: ProgramCheckpoint, plan: ServingPlan, report: Report, steps: StepSeconds | None = None
) -> ProgramEngine:
    """Load the program, check it and warm it up.

    `steps` is the measured step time table, if there is one. Raises a `StartupError` if the plan or the program
    cannot be served.
    """
    prepared_device(plan, report, processor)
    program = load_program(checkpoint, plan, percent(report, "loading weights"))
    served = served_program(checkpoint, program)
    report("warming up")
    check_rows(served)
    engine = ProgramEngine(served, EncodePace(most_rows(checkpoint, plan.batch_target_tokens.value), steps, oldest_first=True))
    engine.stretch = Stretch(plan.throttling_quota.value)
    return engine


def served_program(checkpoint: ProgramCheckpoint, program: Program) -> Served:
    """Return the loaded program together with its signature, as the engine runs it."""
    return Served(program, checkpoint.signature, checkpoint.gives, checkpoint.fewest_rows)


def most_rows(checkpoint: ProgramCheckpoint, wanted: int) -> int:
    """Return the largest number of rows in a step: `wanted`, limited by what the program was exported for."""
    return min(wanted, checkpoint.most_rows or wanted)


def check_rows(served: Served) -> None:
    """Check that two different rows give the same results together as alone.

    Otherwise requests that share a batch would change each other's answers. Raises `CheckpointInvalid` if the
    check fails.
    """
    try:
        both = made_up(served.signature, 2)
        together = served.run(both)
        alone = [served.run({name: tensor[row : row + 1] for name, tensor in both.items()}) for row in range(2)]
    except FAILURES as error:
        raise CheckpointInvalid(f"The program cannot be run: {str(error).splitlines()[0][:300]}") from error
    for name, result in together.items():
        apart = torch.cat([each[name] for each in alone])
        if result.shape != apart.shape or not _alike(result, apart):
            raise CheckpointInvalid(
                f"The program's output {name!r} of a row depends on the other rows of its batch, so requests cannot share one. "
                "Was the model in eval() when it was exported?"
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return bool((one == other).float().mean() > 1 - _CLOSE) if one.numel() else True
    one, other = one.float(), other.float()
    largest = float(other.nan_to_num(0.0).abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_CLOSE * max(largest, 1e-6), equal_nan=True)
