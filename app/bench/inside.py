"""The engine alone, driven step by step without a server, and held against what this machine can do at the most.

Ceilings and work take turns in one run: a machine that others share is never twice the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch

from app.bench.ceilings import Ceilings, Machine, between
from app.bench.console import Advance, progress
from app.bench.driver import Driver
from app.bench.stats import Figure, Outcome, percentile
from app.bench.workload import Deck
from app.engine.build import build_engine
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan
from app.kernels.hybrid import HybridLinear
from app.kernels.linear import Linear, LinearForm
from app.weights.checkpoint import Checkpoint

PREFILL_TOKENS = 512
DECODE_ROWS = (1, 8, 16)
STEPS_PER_ROUND = 20
PREFILLS_PER_ROUND = 3
PREFILL = "prefill"
INTEGERS = ("int8", "int4")  # precisions whose products are of integers
UNITS_PER_ROUND = len(DECODE_ROWS) + 1  # of progress
TARGETS = {"decode ×1": 0.90, PREFILL: 0.75}  # of the read bandwidth, of the product rate


@dataclass(frozen=True, slots=True)
class Weights:
    """What one step must read and multiply: bytes of all products' weights, and multiply-adds (times two) a token and a row of logits."""

    num_bytes: int
    operations_per_token: float
    operations_per_logit_row: float
    cache_bytes: int = 0  # the machine's largest cache

    def floor_seconds(self, tokens: int, logit_rows: int, ceilings: Ceilings) -> tuple[float, float]:
        """The least time to read the weights once, and to multiply with them. What may stay in a cache is read in no time."""
        operations = tokens * self.operations_per_token + logit_rows * self.operations_per_logit_row
        read_bytes = self.num_bytes if self.num_bytes > 2 * self.cache_bytes else 0
        return read_bytes / ceilings.read, operations / ceilings.product


@dataclass(slots=True)
class Samples:
    """Of one workload: seconds of each step (of each prompt for prefill), and each round's share of the two ceilings."""

    tokens: int
    logit_rows: int
    seconds: list[float] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    product_shares: list[float] = field(default_factory=list)

    def hold(self, seconds: list[float], weights: Weights, ceilings: Ceilings) -> None:
        """One round's samples, against the ceilings that stood on both sides of it."""
        self.seconds += seconds
        read, product = weights.floor_seconds(self.tokens, self.logit_rows, ceilings)
        self.read_shares.append(read / statistics.median(seconds))
        self.product_shares.append(product / statistics.median(seconds))


Workloads = dict[str, Samples]


def weights_of(model: torch.nn.Module, vocab_size: int, facts: Facts) -> Weights:
    """Counted from the layers themselves, as they are held."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    output = [layer for layer in layers if layer.out_features == vocab_size]
    inner = [layer for layer in layers if layer.out_features != vocab_size]
    return Weights(
        num_bytes=sum({id(layer.form): _read_bytes(layer.form) for layer in layers}.values()),
        operations_per_token=2.0 * sum(layer.in_features * layer.out_features for layer in inner),
        operations_per_logit_row=2.0 * sum(layer.in_features * layer.out_features for layer in output),
        cache_bytes=max((cache.size_bytes for cache in facts.caches), default=0),
    )


def _read_bytes(form: LinearForm) -> int:
    """What the product of a few rows reads: of a weight that is held in two forms, one."""
    return form.few.nbytes if isinstance(form, HybridLinear) else form.nbytes


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, rounds: int) -> Outcome:
    """Builds the engine as serving does and measures it on this thread."""
    workloads = {f"decode ×{rows}": Samples(rows, rows) for rows in DECODE_ROWS} | {PREFILL: Samples(PREFILL_TOKENS, 1)}
    with progress(rounds * UNITS_PER_ROUND + 1, "loading") as advance:
        started = time.perf_counter()
        built = build_engine(checkpoint, plan, (), lambda stage: None)
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        machine = Machine(plan.threads.value, torch.int8 if plan.precision.value in INTEGERS else built.backend.dtype)
        driver = Driver(built.engine, Deck(range(2, checkpoint.model_config.vocab_size)))
        weights = weights_of(built.model, checkpoint.model_config.vocab_size, facts)
        with closing(machine), torch.inference_mode():
            complete = _rounds(rounds, driver, weights, workloads, machine, advance)
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__, "load_seconds": load_seconds}
    subject = f"{checkpoint.name}, {plan.precision.value}, {plan.threads.value} threads"
    return Outcome("engine", subject, tuple(_figures(machine, workloads)), details, complete)


def _rounds(rounds: int, driver: Driver, weights: Weights, workloads: Workloads, machine: Machine, advance: Advance) -> bool:
    """Rounds of every workload between two samples of the ceilings. Ctrl-C keeps what is measured, and answers False."""
    try:
        for _ in range(rounds):
            machine.sample_other_dtypes()
            for name, samples in workloads.items():
                before = machine.sample()
                seconds = _work(driver, name, samples)
                after = machine.sample()
                samples.hold(seconds, weights, between(before, after))
                advance(name)
    except KeyboardInterrupt:
        return False
    return True


def _work(driver: Driver, name: str, samples: Samples) -> list[float]:
    if name == PREFILL:
        return [driver.prefill(samples.tokens) for _ in range(PREFILLS_PER_ROUND)]
    return driver.decode(samples.tokens, STEPS_PER_ROUND)


def _figures(machine: Machine, workloads: Workloads) -> Iterator[Figure]:
    """The ceilings first."""
    if machine.reads:
        yield Figure("memory read", statistics.median(machine.reads) / 1e9, "GB/s")
    for dtype, rates in machine.products.items():
        if rates:
            unit = "GOP/s" if dtype == torch.int8 else "GFLOP/s"
            yield Figure(f"products, {str(dtype).removeprefix('torch.')}", statistics.median(rates) / 1e9, unit)
    for name, samples in workloads.items():
        if samples.seconds:
            yield from _held(name, samples)


def _held(name: str, samples: Samples) -> Iterator[Figure]:
    middle = statistics.median(samples.seconds)
    what, unit = (f"prefill {samples.tokens}", "prompt") if name == PREFILL else (name, "step")
    read, product = statistics.median(samples.read_shares), statistics.median(samples.product_shares)
    bound, share = ("memory read", read) if read >= product else ("product rate", product)
    yield Figure(f"{what}, one {unit}", middle * 1e3, "ms", p99=percentile(samples.seconds, 0.99) * 1e3)
    target = TARGETS.get(name)
    yield Figure(what, samples.tokens / middle, "tok/s", ratio=share, against=bound, target=target, is_share=True)
