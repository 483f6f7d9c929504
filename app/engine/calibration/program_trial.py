"""Times steps of an exported program that is not loaded: its graph, with synthetic values for large weights.

Small tensors are read, since they may be constants that change what is computed. A program has no repeated layers,
so all of it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from app.engine.calibration.stages import TrialShape, TrialStep, doubling_sizes
from app.engine.calibration.synthetic_weights import FILL_BYTE, synthetic_form
from app.engine.program import INPUT_ERRORS, cannot_run, max_step_rows, served_program, synthetic_inputs
from app.errors import StepFailed
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.weights.load_program import ProgramValues, load_program, read_flat
from app.weights.program import ProgramCheckpoint, operations_per_row, read_bytes
from app.weights.program_archive import Archive, StoredTensor
from armature_kernels.linear.linear import FormFactory, Linear, LinearForm
from armature_kernels.native.memory import allocate_weights
from armature_kernels.timing import MAX_ADJUSTMENT, monotone_table

DEFAULT_STEP_ROWS = 32  # a plan has smaller steps only if the user asked for them
MAX_STEP_ROWS = 256  # rows of a step
LARGE_BYTES = 4 * 2**20  # bytes of a tensor
FILLED_BYTES = 2**28  # a larger tensor is a table of which a step reads some rows: its pages stay untouched


class ProgramTrial:
    """A program under one plan, ready to be timed. The memory is released with the object."""

    def __init__(self, checkpoint: ProgramCheckpoint, plan: ServingPlan) -> None:
        """Build the program. Raises `CheckpointInvalid` if it calls an operator that is not served."""
        self.checkpoint, self.plan = checkpoint, plan
        program = load_program(
            checkpoint, plan, lambda done, total: None, ProgramValues(_synthetic_tensor, _synthetic_product)
        )
        self._served = served_program(checkpoint, program)

    def step_sizes(self) -> list[int]:
        """Return the numbers of rows of the steps to time."""
        asked = self.plan.memory.batch_target_tokens
        most = max_step_rows(self.checkpoint, asked if asked < DEFAULT_STEP_ROWS else max(asked, MAX_STEP_ROWS))
        return doubling_sizes(min(self.checkpoint.min_rows, most), most)

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        """Return the steps to time, the fastest first, since time may run out."""
        sizes = self.step_sizes()
        wanted = {min(max(rows, sizes[0]), sizes[-1]) for rows in trial_shape.rows or sizes}
        return [TrialStep("encode", rows, layers=1) for rows in sorted(wanted)]

    def step(self, shape: TrialStep) -> Callable[[], object]:
        """Return a function that runs that step any number of times.

        It raises `StepFailed` if the program cannot be run.
        """
        inputs = synthetic_inputs(self.checkpoint.signature, shape.size)

        def run() -> object:
            try:
                return self._served.run(inputs)
            except INPUT_ERRORS as error:
                raise StepFailed(cannot_run(error).message) from error

        return run

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        """Return the result, or None if too few steps were measured or their times are inconsistent."""
        encode = monotone_table({shape.size: took for shape, took in seconds.items()}, max_adjustment)
        if not encode:
            return None
        precision = self.plan.weights.precision
        return TrialTimes(
            precision=precision,
            threads=threads,
            decode_seconds={},
            prefill_seconds={},
            encode_seconds=encode,
            read_bytes=read_bytes(self.checkpoint, precision),
            operations_per_token=operations_per_row(self.checkpoint, 1),
        )


def _synthetic_tensor(archive: Archive, stored: StoredTensor) -> Tensor:
    """Return all elements of a stored tensor. A large floating-point tensor is synthetic and is not read."""
    dtype = getattr(torch, stored.dtype)
    nbytes = archive.size(stored.member) if stored.min_member_elements else 0
    if not dtype.is_floating_point or nbytes < LARGE_BYTES:
        return read_flat(archive, stored)
    memory = allocate_weights(nbytes // dtype.itemsize * dtype.itemsize)
    return (memory.fill_(FILL_BYTE) if nbytes <= FILLED_BYTES else memory).view(dtype)


def _synthetic_product(packing: FormFactory, weight: Tensor, bias: Tensor | None) -> LinearForm:
    outputs, inputs = weight.shape
    return synthetic_form(packing, Linear(("program",), inputs, outputs, bias is not None), bias, weight.dtype)
