"""Times steps of an exported program that is not loaded: its graph, with synthetic values for large weights.

Small tensors are read, since they may be constants that change what is computed. A program has no repeated layers,
so all of it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from app.engine.build_program import most_rows, served_program
from app.engine.looks import Look, StepShape, doubling
from app.engine.made_up import PATTERN, made_up_form
from app.engine.program import FAILURES
from app.engine.tensors import made_up
from app.errors import StepFailed
from app.hardware.decision import Trial
from app.hardware.plan import ServingPlan
from app.kernels.calibrate import table
from app.kernels.linear import Linear, LinearForm, Packing
from app.kernels.memory import weights_bytes
from app.weights.archive import Archive, Stored
from app.weights.load_program import Making, flat, load_program
from app.weights.program import ProgramCheckpoint
from app.weights.program_cost import operations_per_row, read_bytes

USUAL_ROWS = 32  # a plan has smaller steps only if the user asked for them
MOST_ROWS = 256  # rows of a step
LARGE_BYTES = 4 * 2**20  # bytes of a tensor
FILLED_BYTES = 2**28  # a larger tensor is a table of which a step reads some rows: its pages stay untouched


class ProgramRehearsal:
    """A program under one plan, ready to be timed. The memory is released with the object."""

    def __init__(self, checkpoint: ProgramCheckpoint, plan: ServingPlan) -> None:
        """Build the program. Raises `CheckpointInvalid` if it calls an operator that is not served."""
        self.checkpoint, self.plan = checkpoint, plan
        program = load_program(checkpoint, plan, lambda done, total: None, Making(_made_up, _form))
        self._served = served_program(checkpoint, program)

    def sizes(self) -> list[int]:
        """Return the numbers of rows of the steps to time."""
        asked = self.plan.batch_target_tokens.value
        most = most_rows(self.checkpoint, asked if asked < USUAL_ROWS else max(asked, MOST_ROWS))
        return doubling(min(self.checkpoint.fewest_rows, most), most)

    def shapes(self, look: Look) -> list[StepShape]:
        """Return the steps to time, the fastest first, since time may run out."""
        sizes = self.sizes()
        wanted = {min(max(rows, sizes[0]), sizes[-1]) for rows in look.rows or sizes}
        return [StepShape("encode", rows, layers=1) for rows in sorted(wanted)]

    def step(self, shape: StepShape) -> Callable[[], object]:
        """Return a function that runs that step any number of times.

        It raises `StepFailed` if the program cannot be run.
        """
        inputs = made_up(self.checkpoint.signature, shape.size)

        def run() -> object:
            try:
                return self._served.run(inputs)
            except FAILURES as error:
                raise StepFailed(f"The program cannot be run: {str(error).splitlines()[0][:300]}") from error

        return run

    def trial(self, threads: int, seconds: Mapping[StepShape, float]) -> Trial | None:
        """Return the result, or None if too few steps were measured or their times are inconsistent."""
        encode = table({shape.size: took for shape, took in seconds.items()})
        if not encode:
            return None
        precision = self.plan.precision.value
        return Trial(
            precision=precision,
            threads=threads,
            decode_seconds={},
            prefill_seconds={},
            encode_seconds=encode,
            read_bytes=read_bytes(self.checkpoint, precision),
            operations_per_token=operations_per_row(self.checkpoint, 1),
        )


def _made_up(archive: Archive, stored: Stored) -> Tensor:
    """Return all elements of a stored tensor. A large floating-point tensor is synthetic and is not read."""
    dtype = getattr(torch, stored.dtype)
    nbytes = archive.size(stored.member) if stored.last else 0
    if not dtype.is_floating_point or nbytes < LARGE_BYTES:
        return flat(archive, stored)
    memory = weights_bytes(nbytes // dtype.itemsize * dtype.itemsize)
    return (memory.fill_(PATTERN) if nbytes <= FILLED_BYTES else memory).view(dtype)


def _form(packing: Packing, weight: Tensor, bias: Tensor | None) -> LinearForm:
    outputs, inputs = weight.shape
    return made_up_form(packing, Linear(("program",), inputs, outputs, bias is not None), bias, weight.dtype)
