"""The engine of an encoder without a server: batches of texts of one length, against the machine's ceilings.

Times are from an idle engine to the answer. Work and samples of the ceilings alternate, as for decoders
(`bench/engine/decoder.py`): the product rates in BF16 and in int8 are sampled between any two loads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from app.engine.build import BuildRequest, BuiltEngine
from app.engine.encoder.build import build_device_encoder_engine, build_encoder_engine
from app.engine.encoder.engine import EncoderEngine
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import StepTimeTable
from app.messages import ArraysReady, Encode, Event, Text
from app.metrics.steps import StepStats, StepTimeModel
from app.models.encoders.config import EncoderConfig, encoder_products_of
from app.models.encoders.encoder import Encoder
from app.weights.checkpoint import Checkpoint
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, MeasurementFailed, percentile, progress
from armature_bench.engine.ceilings import CeilingSampler, WorkSamples, mean_ceilings
from armature_bench.engine.decoder import EngineBenchOptions, ceiling_sampler, device_label, gc_disabled
from armature_bench.engine.driver import ProductCosts, largest_cache_bytes, product_costs
from armature_bench.http.workload import TokenPrompts

CPU_TEXTS = (1, 4, 8, 16, 32)  # texts of a batch
DEVICE_TEXTS = (1, 8, 32, 256)  # texts of a batch on a device with its own memory
TEXT_LENGTHS = (128, 512)  # tokens of a text
SHORT_TOKENS = 16  # length of a single text for an idle server
ROUND_SECONDS = 1.5  # duration of a load's repetitions in each round
MAX_REPEATS = 50  # repetitions in each round
_KINDS = {"bf16": torch.bfloat16, "int8": torch.int8}  # dtypes whose product rates the loads are compared with


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """A request of `texts` texts with `length` tokens each."""

    texts: int
    length: int

    @property
    def name(self) -> str:
        """Name of the load in tables, such as `×8 of 128`."""
        return f"×{self.texts} of {self.length}"

    @property
    def tokens(self) -> int:
        return self.texts * self.length


@dataclass(slots=True)
class BatchTimes:
    """Measurements of one load: samples for the ceilings, and the share of each batch's time spent in the model."""

    samples: WorkSamples
    model_shares: list[float] = field(default_factory=list)


class NamedLoad(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=NamedLoad)
N_in = TypeVar("N_in", bound=NamedLoad, contravariant=True)


class LoadDriver(Protocol[N_in]):
    def answer(self, load: N_in) -> tuple[float, float]:
        """Return the seconds from an idle engine to the answer of one request, and the seconds in the model."""
        ...


def encoder_loads(options: EngineBenchOptions, max_model_len: int, on_device: bool = False) -> list[EncoderLoad]:
    """Return the named loads, or else one short text and all standard batches and lengths of the model."""
    batches = options.rows or (DEVICE_TEXTS if on_device else CPU_TEXTS)
    lengths = [length for length in options.prompts or TEXT_LENGTHS if length <= max_model_len]
    if not lengths:
        raise MeasurementFailed(f"the model reads {max_model_len} tokens at most: use shorter lengths (--prompts)")
    named = options.rows or options.prompts
    short = [] if named else [EncoderLoad(1, min(SHORT_TOKENS, max_model_len))]
    return [*short, *(EncoderLoad(texts, length) for length in lengths for texts in batches)]


def encoder_operations(config: EncoderConfig, load: EncoderLoad) -> float:
    """Return the operations of a load's products: multiply-adds times two.

    After the attention of the last layer, only the tokens with pooled hidden states are counted.
    """
    shapes = [rows * columns for (rows, columns), _ in encoder_products_of(config)]
    modes = {config.head.pooling} if config.head is not None else set(config.pooling.modes)
    tail = sum(shapes[-(len(shapes) // config.num_layers) + 1 :]) if modes <= {"cls", "last"} and len(modes) == 1 else 0
    return 2.0 * (load.tokens * (sum(shapes) - tail) + load.texts * tail)


def measure_encoder_engine(
    checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, steps: StepTimeTable | None, options: EngineBenchOptions
) -> BenchOutcome:
    on_device, config = plan.placement.device != "cpu", checkpoint.encoder
    loads = encoder_loads(options, plan.memory.max_model_len, on_device)
    with progress(options.rounds * len(loads) + 1, "loading") as advance:
        started = time.perf_counter()
        built = _build_planned_encoder(BuildRequest(checkpoint, plan, step_time_model=StepTimeModel(steps)), on_device)
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        machine = ceiling_sampler(plan, built.backend, _KINDS.values())
        weights = product_costs(built.model, -1, largest_cache_bytes(facts, built.backend.device))
        measured = {
            load: BatchTimes(WorkSamples(_weight_bytes_read(weights, plan, load), encoder_operations(config, load)))
            for load in loads
        }
        with closing(machine), torch.inference_mode(), gc_disabled():
            complete = run_batch_rounds(options, EncoderDriver(built.engine, config), measured, machine, advance)
    taken = {load: each for load, each in measured.items() if each.samples.seconds}
    details = {
        "machine": facts.to_json(),
        "plan": plan.to_json(),
        "torch": torch.__version__,
        "load_seconds": load_seconds,
    }
    seconds = {load.name: [round(one, 7) for one in each.samples.seconds] for load, each in taken.items()}
    subject = f"{checkpoint.name}, {plan.weights.precision}, {device_label(plan)}"
    figures = (*machine.figures(), *(_figure(load, taken[load], machine) for load in taken))
    return BenchOutcome("engine", subject, figures, details | {"batch_seconds": seconds}, complete, _notes(built))


class EncoderDriver:
    """Submits texts that never repeat to an engine and times the answers."""

    def __init__(self, engine: EncoderEngine, config: EncoderConfig) -> None:
        self._engine, self._output = engine, config.outputs[0]
        self._prompts = TokenPrompts(range(2, config.vocab_size))
        self._number = 0

    def answer(self, load: EncoderLoad) -> tuple[float, float]:
        texts = tuple(Text(tuple(self._prompts.prompt(load.length))) for _ in range(load.texts))
        self._number += 1
        order = Encode(f"bench-{self._number}", texts, (self._output,), time.monotonic())
        return time_request(self._engine, lambda: self._engine.add(order), load)


class SteppedEngine(Protocol):
    """An engine that answers with arrays, as far as the bench steps it."""

    @property
    def has_work(self) -> bool: ...

    @property
    def stats(self) -> StepStats | None:
        """Statistics of the last step, or None before the first one."""

    def step(self) -> list[Event]: ...


def time_request(engine: SteppedEngine, add: Callable[[], list[Event]], load: NamedLoad) -> tuple[float, float]:
    """Return the seconds from an idle engine to the answer to a request, and the seconds in the model.

    `add` submits the request and returns its first events. Raises `MeasurementFailed` if it failed.
    """
    start, inside = time.perf_counter(), 0.0
    events = add()
    while engine.has_work:
        events += engine.step()
        inside += engine.stats.model_seconds if engine.stats else 0.0
    seconds = time.perf_counter() - start
    if not all(isinstance(event, ArraysReady) for event in events):
        raise MeasurementFailed(f"{load.name} was not answered: {events}")
    return seconds, inside


def run_batch_rounds(
    options: EngineBenchOptions,
    driver: LoadDriver[N],
    measured: dict[N, BatchTimes],
    machine: CeilingSampler,
    advance: AdvanceProgress,
) -> bool:
    """Run every load in every round, with a sample of all ceilings between any two loads.

    Ctrl-C stops early, keeps the measurements, and makes the result False.
    """
    try:
        for load in measured:
            driver.answer(load)  # the first request of each size records steps for later ones
        for _ in range(options.rounds):
            before = machine.sample()
            for load, taken in measured.items():
                found = _repeated(driver, load, None if options.steps is None else options.steps_per_round)
                machine.sample_other_dtypes()
                after = machine.sample()
                taken.samples.add_round([seconds for seconds, _ in found], mean_ceilings(before, after))
                taken.model_shares += [inside / seconds for seconds, inside in found]
                before = after
                advance(load.name)
    except KeyboardInterrupt:
        return False
    return True


def _repeated(driver: LoadDriver[N], load: N, times: int | None) -> list[tuple[float, float]]:
    """Run the load `times` times, or if None, repeatedly for `ROUND_SECONDS`."""
    found: list[tuple[float, float]] = []
    ends = time.perf_counter() + ROUND_SECONDS
    while len(found) < (times or 1) or (times is None and len(found) < MAX_REPEATS and time.perf_counter() < ends):
        found.append(driver.answer(load))
    return found


def _weight_bytes_read(weights: ProductCosts, plan: ServingPlan, load: EncoderLoad) -> float:
    """Return the weight bytes that a load reads: all weights once per step."""
    together = max(1, plan.memory.batch_target_tokens // load.length)
    return weights.read_bytes(load.length) * math.ceil(load.texts / together)


def _figure(load: EncoderLoad, taken: BatchTimes, machine: CeilingSampler) -> Figure:
    samples = taken.samples
    bound, share = samples.bound
    rates = {name: machine.products.get(kind, []) for name, kind in _KINDS.items()}
    parts = {
        "p95": percentile(samples.seconds, 0.95) * 1e3,
        "samples/s": load.texts / samples.middle,
        "tok/s": load.tokens / samples.middle,
        **{f"of {name}": samples.operations / samples.middle / median(found) for name, found in rates.items() if found},
        "in the model": median(taken.model_shares),
    }
    return Figure(
        load.name,
        samples.middle * 1e3,
        "ms",
        p99=samples.p99 * 1e3,
        ratio=share,
        against=bound,
        is_share=True,
        parts=parts,
    )


def _build_planned_encoder(
    request: BuildRequest[Checkpoint], on_device: bool
) -> BuiltEngine[EncoderEngine, Any, Encoder]:
    return build_device_encoder_engine(request) if on_device else build_encoder_engine(request)


def _notes(built: BuiltEngine[EncoderEngine, Any, Encoder]) -> tuple[str, ...]:
    replay = built.runner.replay
    how = (
        f"steps of up to {replay.most_tokens} tokens were replayed natively"
        if not replay.reason
        else f"eager: {replay.reason}"
    )
    return (f"{how}.",)
