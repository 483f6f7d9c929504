"""Calibration: this machine timed with a checkpoint's shapes before any of its weights is read, inside a time budget.

Out come `Measurements`, which the plan takes for facts. Where samples differ too much for that, they say so and the plan does without.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from app.backends.selection import select_backend
from app.engine.rehearsal import CHUNK_TOKENS, CONTEXT_ROWS, Extent, Rehearsal, StepShape
from app.hardware.decision import Measurements, Trial
from app.hardware.plan import ServingPlan
from app.kernels.calibrate import Block, Clock, Point, Rounds, border, by_size, table
from app.kernels.ceilings import ProductCeiling, ReadCeiling
from app.models.config import ModelConfig

READ_BYTES = (
    2**27
)  # of the buffer that the read ceiling is sampled with: four times a large cache, filled in some hundredths of a second
PRODUCT_SHAPES = ((256, 2048, 2048),)
CEILINGS_SECONDS = 0.4  # what both ceilings take; a budget with no room for them is for a model that nothing is at stake for
COARSE_ROWS = (1, 8)
MANY_ROWS = 32  # beyond, a decode step is timed if there is time
COARSE_TOKENS = (128,)
COARSE_LAYERS, FULL_LAYERS = 8, 4  # one in so many is made
COARSE_OUTPUTS = 2048
PRECISIONS_SHARE = 0.4  # of the budget, for a look at all precisions that may be chosen
THREADS_SHARE = 0.25  # of the rest, for a look at how many threads are best
COPY_SHARE = 0.25  # of the rest, for prompts in eight bits beside four
PATIENCE = 3  # times as many samples where they differ too much, if there is time

Report = Callable[[str], None]
Key = tuple[int, StepShape]  # threads, step


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. `ways`: a plan for each precision that may be chosen; `copy`: one that holds eight bits beside four, where that may
    be. `threads` may serve, the most first. `choose` says which precision and how many threads the plan takes after a look at all."""

    config: ModelConfig
    ways: tuple[ServingPlan, ...]
    threads: tuple[int, ...]
    choose: Callable[[Measurements], tuple[str, int]]
    copy: ServingPlan | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timer:
    """Until when, by which clock, and who is told how far it is; `report` may raise, to stop."""

    deadline: float
    report: Report
    clock: Clock = time.perf_counter

    def share(self, part: float) -> Timer:
        """A part of the time that is left."""
        now = self.clock()
        return replace(self, deadline=now + part * max(0.0, self.deadline - now))

    def less(self, seconds: float) -> Timer:
        """All but so many seconds."""
        return replace(self, deadline=self.deadline - seconds)


def measure(subject: Subject, budget_seconds: float, report: Report, clock: Clock = time.perf_counter) -> Measurements:
    """On the thread that will serve: its pool is left at the number of threads tried last, until the backend is configured."""
    began = clock()
    timer = Timer(began + budget_seconds, report, clock)
    backend = select_backend(subject.ways[0])
    backend.configure(subject.ways[0])
    with torch.inference_mode():
        if budget_seconds <= 4 * CEILINGS_SECONDS:
            found = _trials(subject, timer, Measurements())
        else:
            report("calibrating: ceilings")
            before = _ceilings(subject)
            found = _between(before, _trials(subject, timer.less(CEILINGS_SECONDS), before), _ceilings(subject))
    gc.collect()  # made-up weights go before the real ones come
    return replace(found, seconds=clock() - began)


def _ceilings(subject: Subject) -> Measurements:
    threads = subject.threads[0]
    torch.set_num_threads(threads)
    with closing(ReadCeiling(threads, max(READ_BYTES, 2 * subject.cache_bytes))) as reading:
        read = reading.sample()
    products: dict[str, float] = {}
    for precision in {plan.precision.value for plan in subject.ways}:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision, torch.int8)
        rate = ProductCeiling(dtype, PRODUCT_SHAPES).sample()
        if rate == rate:  # no form multiplies it here: not a number
            products[precision] = rate
    return Measurements(read_bytes_per_second=read, products_per_second=products)


def _between(before: Measurements, found: Measurements, after: Measurements) -> Measurements:
    """What was found, held against what the machine could do before and after it. A product is slow for others' sake alone."""
    assert before.read_bytes_per_second and after.read_bytes_per_second, "both were read"
    read = (before.read_bytes_per_second + after.read_bytes_per_second) / 2
    rates = {name: max(rate, after.products_per_second.get(name, 0.0)) for name, rate in before.products_per_second.items()}
    return replace(found, read_bytes_per_second=read, products_per_second=rates)


def _trials(subject: Subject, timer: Timer, found: Measurements) -> Measurements:
    """A look at every precision that may be chosen, then at every number of threads, then a full table of what the plan takes."""
    plan, threads, looked = subject.ways[0], subject.threads[0], list[Trial]()
    if len(subject.ways) > 1:
        looking = timer.share(PRECISIONS_SHARE)
        for index, way in enumerate(subject.ways):
            session = Session(subject, way, looking.share(1 / (len(subject.ways) - index)))
            looked += session.trials((threads,), COARSE)
        name = subject.choose(replace(found, trials=tuple(looked)))[0]
        plan = next((way for way in subject.ways if way.precision.value == name), plan)
    if len(subject.threads) > 1:
        counts = Session(subject, plan, timer.share(THREADS_SHARE)).trials(subject.threads, COARSE)
        looked = [*counts, *_not_again(looked, counts)]
        asked = subject.choose(replace(found, trials=tuple(looked)))[1]
        threads = asked if asked in subject.threads else threads
    copies = subject.copy is not None and plan.precision.value == "int4"
    session = Session(subject, plan, timer.share(1 - COPY_SHARE) if copies else timer)
    full = session.trials((threads,), FULL)
    if not full and not looked:
        return replace(found, fallback=session.noise)
    found = replace(found, trials=(*full, *_not_again(looked, full)))
    return _with_copy(subject, timer, found, full[0]) if copies and full else found


def _not_again(older: Iterable[Trial], newer: Sequence[Trial]) -> list[Trial]:
    known = {(trial.precision, trial.threads) for trial in newer}
    return [trial for trial in older if (trial.precision, trial.threads) not in known]


def _with_copy(subject: Subject, timer: Timer, found: Measurements, lean: Trial) -> Measurements:
    """Four bits for few rows and eight for many: which is the quicker at how many, and what a step then takes."""
    assert subject.copy is not None, "whoever calls has asked"
    sizes = tuple(sorted({64, 128, max(lean.prefill_seconds)}))
    eight = Session(subject, subject.copy, timer).trials((lean.threads,), replace(COARSE, rows=COARSE_ROWS[:1], tokens=sizes))
    if not eight:
        return found
    many = eight[0].prefill_seconds
    rows = border(lean.prefill_seconds, many)
    prefill = {
        size: min(seconds, many[size]) if rows is not None and size > rows and size in many else seconds
        for size, seconds in lean.prefill_seconds.items()
    }
    both = replace(lean, prefill_seconds=table(prefill) or prefill, int8_copy=True)
    return replace(found, trials=(*found.trials, both), most_few_rows=rows)


@dataclass(frozen=True, slots=True)
class Look:
    """How closely a way is timed: at which rows and tokens (none: at all that matter), and with how much of the model made up."""

    layers_share: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    most_outputs: int | None = None
    context: bool = False


FULL = Look(FULL_LAYERS, context=True)
COARSE = Look(COARSE_LAYERS, COARSE_ROWS, COARSE_TOKENS, COARSE_OUTPUTS)


class Session:
    """One way to serve, timed. `noise` says why it gave no trial."""

    def __init__(self, subject: Subject, plan: ServingPlan, timer: Timer) -> None:
        self.subject, self.plan, self.timer = subject, plan, timer
        self.noise = ""

    def trials(self, threads: Sequence[int], look: Look) -> list[Trial]:
        """One for each number of threads; they take turns."""
        self.timer.report(f"calibrating: {self.plan.precision.value}")
        extent = Extent(self.subject.cache_bytes, look.layers_share, look.most_outputs)
        rehearsal = Rehearsal(self.subject.config, self.plan, select_backend(self.plan), extent)
        blocks = [self._block(rehearsal, number, _shapes(rehearsal, look)) for number in threads]
        rounds: Rounds[Key] = Rounds(self.timer.deadline, self.timer.clock)
        for rounds.patience in (1, PATIENCE):
            rounds.take(blocks)
            self.noise = rounds.noise()
            if not self.noise:
                break
        found = [] if self.noise else [_trial(rehearsal, number, rounds.medians()) for number in threads]
        trials = [trial for trial in found if trial is not None]
        if not self.noise and not trials:
            self.noise = "steps with more rows or layers were measured shorter than steps with fewer"
        return trials

    def _block(self, rehearsal: Rehearsal, threads: int, shapes: Iterable[StepShape]) -> Block[Key]:
        def begin() -> None:
            self.timer.report(f"calibrating: {self.plan.precision.value}")
            torch.set_num_threads(threads)

        return Block(begin, [Point((threads, shape), rehearsal.step(shape)) for shape in shapes])


def _shapes(rehearsal: Rehearsal, look: Look) -> list[StepShape]:
    """The quickest first: for the last there may be no time."""
    two, around = rehearsal.layer_counts[:2], sorted({rehearsal.layer_counts[0], rehearsal.layer_counts[-1]})
    most_rows, most_tokens = max(rehearsal.decode_rows()), max(rehearsal.prefill_tokens())
    rows = sorted({min(size, most_rows) for size in look.rows or rehearsal.decode_rows()})
    tokens = sorted({min(size, most_tokens) for size in look.tokens or rehearsal.prefill_tokens()})
    shapes = [StepShape("decode", size, layers) for size in rows if size <= MANY_ROWS for layers in around]
    if look.context and rehearsal.context:
        shapes.append(StepShape("decode", CONTEXT_ROWS, around[-1], rehearsal.context))
    shapes += [StepShape("prefill", size, layers) for size in tokens if size <= CHUNK_TOKENS for layers in two]
    if look.context and rehearsal.context:
        shapes.append(StepShape("prefill", CHUNK_TOKENS, two[-1], rehearsal.context))
    shapes += [StepShape("prefill", size, layers) for size in tokens if size > CHUNK_TOKENS for layers in two]
    return shapes + [StepShape("decode", size, layers) for size in rows if size > MANY_ROWS for layers in around]


def _trial(rehearsal: Rehearsal, threads: int, medians: dict[Key, float]) -> Trial | None:
    """None where too little of it was measured, or nonsense."""
    own = {shape: seconds for (number, shape), seconds in medians.items() if number == threads}
    layers = rehearsal.config.num_layers
    decode, prefill = (
        table(by_size(((s.size, s.layers, seconds) for s, seconds in own.items() if s.kind == kind and not s.context), count))
        for kind, count in (("decode", rehearsal.decode_layers), ("prefill", float(layers)))
    )
    if not decode or not prefill:
        return None
    return Trial(
        precision=rehearsal.plan.precision.value,
        threads=threads,
        decode_seconds=decode,
        prefill_seconds=prefill,
        context_token_seconds=_of_context(own, "decode", CONTEXT_ROWS, layers),
        pair_seconds=_of_context(own, "prefill", CHUNK_TOKENS, layers),
        read_bytes=rehearsal.read_bytes,
        operations_per_token=rehearsal.operations_per_token,
    )


def _of_context(own: dict[StepShape, float], kind: str, size: int, num_layers: int) -> float:
    """Seconds that each token of context adds for each token of the step, all layers together; 0 where it was not measured."""
    for shape, seconds in own.items():
        without = own.get(replace(shape, context=0))
        if shape.kind == kind and shape.size == size and shape.context and without is not None:
            return max(0.0, seconds - without) / (size * shape.context) * num_layers / shape.layers
    return 0.0
