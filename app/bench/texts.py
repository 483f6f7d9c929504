"""The engine of an encoder without a server: batches of texts of one length, against the machine's ceilings.

Times are from an idle engine to the answer. Work and samples of the ceilings alternate, as for decoders
(`inside.py`): the product rates in BF16 and in int8 are sampled between any two loads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

import torch

from app.bench.ceilings import Sampled, Samples, between
from app.bench.console import Advance, progress
from app.bench.floors import Weights, cache_of, weights_of
from app.bench.inside import Asked, frozen, machine_of, place_of
from app.bench.stats import Figure, MeasurementFailed, Outcome, percentile
from app.bench.workload import Deck
from app.engine.build_device_encoder import BuiltDeviceEncoder, build_device_encoder
from app.engine.build_encoder import BuiltEncoder, build_encoder
from app.engine.encoder import EncoderEngine
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import StepSeconds
from app.measured import StepStats
from app.messages import ArraysReady, Encode, Event, Text
from app.models.encoder_config import EncoderConfig
from app.models.encoder_shapes import encoder_products_of
from app.weights.checkpoint import Checkpoint

TEXTS = (1, 4, 8, 16, 32)  # texts of a batch
DEVICE_TEXTS = (1, 8, 32, 256)  # texts of a batch on a device with its own memory
LENGTHS = (128, 512)  # tokens of a text
SHORT_TOKENS = 16  # length of a single text for an idle server
ROUND_SECONDS = 1.5  # duration of a load's repetitions in each round
MOST_REPEATS = 50  # repetitions in each round
_KINDS = {"bf16": torch.bfloat16, "int8": torch.int8}  # dtypes whose product rates the loads are compared with


@dataclass(frozen=True, slots=True)
class Load:
    """A request of `texts` texts with `length` tokens each."""

    texts: int
    length: int

    @property
    def name(self) -> str:
        """Name of the load in tables, such as `×8 of 128`."""
        return f"×{self.texts} of {self.length}"

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts together."""
        return self.texts * self.length


@dataclass(slots=True)
class Taken:
    """Measurements of one load: samples for the ceilings, and the share of each batch's time spent in the model."""

    samples: Samples
    model_shares: list[float] = field(default_factory=list)


class Named(Protocol):
    """A load with a name for tables."""

    @property
    def name(self) -> str:
        """Name of the load in tables."""


N = TypeVar("N", bound=Named)
N_in = TypeVar("N_in", bound=Named, contravariant=True)


class Answering(Protocol[N_in]):
    """A driver that submits a load to an engine."""

    def answer(self, load: N_in) -> tuple[float, float]:
        """Return the seconds from an idle engine to the answer of one request, and those spent in the model."""
        ...


def loads_of(asked: Asked, max_model_len: int, on_device: bool = False) -> list[Load]:
    """Return the named loads, or else one short text and all standard batches and lengths that the model supports."""
    batches = asked.rows or (DEVICE_TEXTS if on_device else TEXTS)
    lengths = [length for length in asked.prompts or LENGTHS if length <= max_model_len]
    if not lengths:
        raise MeasurementFailed(f"the model reads {max_model_len} tokens at most: use shorter lengths (--prompts)")
    named = asked.rows or asked.prompts
    short = [] if named else [Load(1, min(SHORT_TOKENS, max_model_len))]
    return [*short, *(Load(texts, length) for length in lengths for texts in batches)]


def operations(config: EncoderConfig, load: Load) -> float:
    """Return the operations of a load's products: multiply-adds times two.

    After the attention of the last layer, only the tokens whose hidden states are pooled are counted.
    """
    shapes = [rows * columns for (rows, columns), _ in encoder_products_of(config)]
    modes = {config.head.pooling} if config.head is not None else set(config.pooling.modes)
    tail = sum(shapes[-(len(shapes) // config.num_layers) + 1 :]) if modes <= {"cls", "last"} and len(modes) == 1 else 0
    return 2.0 * (load.tokens * (sum(shapes) - tail) + load.texts * tail)


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, steps: StepSeconds | None, asked: Asked) -> Outcome:
    """Build the engine as for serving and measure it on this thread."""
    on_device, config = plan.device.value != "cpu", checkpoint.encoder
    loads = loads_of(asked, plan.max_model_len.value, on_device)
    with progress(asked.rounds * len(loads) + 1, "loading") as advance:
        started = time.perf_counter()
        build = build_device_encoder if on_device else build_encoder
        built = build(checkpoint, plan, lambda stage: None, steps)
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        machine = machine_of(plan, built.backend, _KINDS.values())
        weights = weights_of(built.model, -1, cache_of(facts, built.backend.device))
        measured = {load: Taken(Samples(_read(weights, plan, load), operations(config, load))) for load in loads}
        with closing(machine), torch.inference_mode(), frozen():
            complete = take_rounds(asked, Driver(built.engine, config), measured, machine, advance)
    taken = {load: each for load, each in measured.items() if each.samples.seconds}
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__, "load_seconds": load_seconds}
    seconds = {load.name: [round(one, 7) for one in each.samples.seconds] for load, each in taken.items()}
    subject = f"{checkpoint.name}, {plan.precision.value}, {place_of(plan)}"
    figures = (*machine.figures(), *(_figure(load, taken[load], machine) for load in taken))
    return Outcome("engine", subject, figures, details | {"batch_seconds": seconds}, complete, _notes(built))


class Driver:
    """Submits texts that never repeat to an engine and times the answers."""

    def __init__(self, engine: EncoderEngine, config: EncoderConfig) -> None:
        self._engine, self._output = engine, config.outputs[0]
        self._deck = Deck(range(2, config.vocab_size))
        self._number = 0

    def answer(self, load: Load) -> tuple[float, float]:
        """Return the seconds from an idle engine to the answer of one request, and those spent in the model."""
        texts = tuple(Text(tuple(self._deck.prompt(load.length))) for _ in range(load.texts))
        self._number += 1
        order = Encode(f"bench-{self._number}", texts, (self._output,), time.monotonic())
        return timed(self._engine, lambda: self._engine.add(order), load)


class Stepped(Protocol):
    """An engine that answers with arrays, as far as the bench steps it."""

    @property
    def has_work(self) -> bool:
        """True while a request is unanswered."""

    @property
    def stats(self) -> StepStats | None:
        """Statistics of the last step, or None before the first one."""

    def step(self) -> list[Event]:
        """Run one step and return its events."""


def timed(engine: Stepped, add: Callable[[], list[Event]], load: Named) -> tuple[float, float]:
    """Return the seconds from an idle engine to the answer to a request, and those spent in the model.

    `add` submits the request and returns its first events.

    Raises:
        MeasurementFailed: The request failed.
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


def take_rounds(asked: Asked, driver: Answering[N], measured: dict[N, Taken], machine: Sampled, advance: Advance) -> bool:
    """Run every load in every round, with a sample of all ceilings between any two loads.

    Ctrl-C stops early, keeps the measurements, and makes the result False.
    """
    try:
        for load in measured:
            driver.answer(load)  # the first request of each size records steps for later ones
        for _ in range(asked.rounds):
            before = machine.sample()
            for load, taken in measured.items():
                found = _repeated(driver, load, None if asked.steps is None else asked.steps_per_round)
                machine.sample_other_dtypes()
                after = machine.sample()
                taken.samples.hold([seconds for seconds, _ in found], between(before, after))
                taken.model_shares += [inside / seconds for seconds, inside in found]
                before = after
                advance(load.name)
    except KeyboardInterrupt:
        return False
    return True


def _repeated(driver: Answering[N], load: N, times: int | None) -> list[tuple[float, float]]:
    """Run the load `times` times, or if None, repeatedly for `ROUND_SECONDS`."""
    found: list[tuple[float, float]] = []
    ends = time.perf_counter() + ROUND_SECONDS
    while len(found) < (times or 1) or (times is None and len(found) < MOST_REPEATS and time.perf_counter() < ends):
        found.append(driver.answer(load))
    return found


def _read(weights: Weights, plan: ServingPlan, load: Load) -> float:
    """Return the weight bytes that a load reads: all weights once per step."""
    together = max(1, plan.batch_target_tokens.value // load.length)
    return weights.read_bytes * math.ceil(load.texts / together)


def _figure(load: Load, taken: Taken, machine: Sampled) -> Figure:
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


def _notes(built: BuiltEncoder | BuiltDeviceEncoder) -> tuple[str, ...]:
    replay = built.runner.replay
    how = f"steps of up to {replay.most_tokens} tokens were replayed natively" if not replay.reason else f"eager: {replay.reason}"
    return (f"{how}.",)
