"""The engine of an exported program without a server: batches of synthetic rows, against the machine's ceilings.

Times are from an idle engine to the answer. Costs are those of the graph's linear layers and convolutions and their
weights (`weights/program.py`).
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import torch

from app.engine.build import BuildRequest
from app.engine.program import ProgramEngine, build_program_engine, synthetic_inputs, to_array
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import StepTimeTable
from app.messages import Array, Infer, Signature
from app.metrics.steps import StepTimeModel
from app.models.program_graph import SAMPLE_SIZE
from app.weights.program import ProgramCheckpoint, operations_per_row, read_bytes
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, percentile, progress
from armature_bench.engine.ceilings import CpuCeilingSampler, WorkSamples
from armature_bench.engine.decoder import INTEGER_PRECISIONS, EngineBenchOptions, gc_disabled
from armature_bench.engine.driver import ProductCosts
from armature_bench.engine.encoder import BatchTimes, run_batch_rounds, time_request

ROWS = (1, 4, 8, 16, 32)  # rows of a batch
_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ProgramLoad:
    rows: int

    @property
    def name(self) -> str:
        """Name of the load in tables, such as `×8`."""
        return f"×{self.rows}"


def measure_program_engine(
    checkpoint: ProgramCheckpoint,
    plan: ServingPlan,
    facts: Facts,
    steps: StepTimeTable | None,
    options: EngineBenchOptions,
) -> BenchOutcome:
    """Build the engine as for serving and measure it on this thread.

    Raises `MeasurementFailed` if prompt lengths were given, or a request failed.
    """
    if options.prompts:
        raise MeasurementFailed("--prompts does not apply to an exported program: use --rows")
    loads = [ProgramLoad(rows) for rows in options.rows or ROWS]
    with progress(options.rounds * len(loads) + 1, "loading") as advance:
        started = time.perf_counter()
        engine = build_program_engine(BuildRequest(checkpoint, plan, step_time_model=StepTimeModel(steps))).engine
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        own = torch.int8 if plan.weights.precision in INTEGER_PRECISIONS else _KINDS[plan.weights.precision]
        machine = CpuCeilingSampler(plan.cpu.threads, own, {own})
        measured = {load: BatchTimes(_minimum_work(checkpoint, plan, facts, load)) for load in loads}
        with closing(machine), torch.inference_mode(), gc_disabled():
            complete = run_batch_rounds(
                options, ProgramDriver(engine, checkpoint.signature), measured, machine, advance
            )
    taken = {load: each for load, each in measured.items() if each.samples.seconds}
    details = {
        "machine": facts.to_json(),
        "plan": plan.to_json(),
        "torch": torch.__version__,
        "load_seconds": load_seconds,
    }
    seconds = {load.name: [round(one, 7) for one in each.samples.seconds] for load, each in taken.items()}
    subject = f"{checkpoint.name}, {plan.weights.precision}, {plan.cpu.threads} threads"
    figures = (*machine.figures(), *(_figure(load, each) for load, each in taken.items()))
    return BenchOutcome(
        "engine", subject, figures, details | {"batch_seconds": seconds}, complete, _notes(checkpoint, plan)
    )


class ProgramDriver:
    def __init__(self, engine: ProgramEngine, signature: Signature) -> None:
        self._engine, self._signature = engine, signature
        self._inputs: dict[ProgramLoad, dict[str, Array]] = {}
        self._number = 0

    def answer(self, load: ProgramLoad) -> tuple[float, float]:
        if load not in self._inputs:
            tensors = synthetic_inputs(self._signature, load.rows)
            self._inputs[load] = {
                spec.name: to_array(tensors[spec.name], spec.datatype) for spec in self._signature.inputs
            }
        self._number += 1
        outputs = tuple(spec.name for spec in self._signature.outputs)
        order = Infer(f"bench-{self._number}", self._inputs[load], outputs, time.monotonic())
        return time_request(self._engine, lambda: self._engine.add(order), load)


def _minimum_work(checkpoint: ProgramCheckpoint, plan: ServingPlan, facts: Facts, load: ProgramLoad) -> WorkSamples:
    """Return empty samples with the bytes and operations that the load needs at least."""
    cache = max((cache.size_bytes for cache in facts.caches), default=0)
    operations = operations_per_row(checkpoint, SAMPLE_SIZE)
    weights = ProductCosts(read_bytes(checkpoint, plan.weights.precision), operations, 0.0, cache)
    return WorkSamples(weights.read_bytes(load.rows) * _num_steps(plan, load), weights.operations(load.rows, 0))


def _num_steps(plan: ServingPlan, load: ProgramLoad) -> int:
    return math.ceil(load.rows / plan.memory.batch_target_tokens)


def _figure(load: ProgramLoad, taken: BatchTimes) -> Figure:
    samples = taken.samples
    bound, share = samples.bound
    parts = {
        "p95": percentile(samples.seconds, 0.95) * 1e3,
        "samples/s": load.rows / samples.middle,
        "in the model": median(taken.model_shares),
    }
    bound_share = (
        (share, bound) if share > 0.0 else (None, "")
    )  # 0: the program has neither linear layers nor convolutions
    return Figure(
        load.name,
        samples.middle * 1e3,
        "ms",
        p99=samples.p99 * 1e3,
        ratio=bound_share[0],
        against=bound_share[1],
        is_share=True,
        parts=parts,
    )


def _notes(checkpoint: ProgramCheckpoint, plan: ServingPlan) -> tuple[str, ...]:
    steps = (
        f"Steps have up to {plan.memory.batch_target_tokens} rows; rows are synthetic, and integers in them are 0 or 1."
    )
    millions = operations_per_row(checkpoint, SAMPLE_SIZE) / 1e6
    counted = f"Counted are linear layers and convolutions: {millions:,.3g} million operations a row."
    free = (f"Free dimensions are {SAMPLE_SIZE}.",) if checkpoint.needs().rows_vary else ()
    return (steps, counted, *free)
