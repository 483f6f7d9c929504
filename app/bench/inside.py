"""The engine alone, driven step by step without a server, and held against what this machine can do at the most.

Ceilings and work take turns in one run: a machine that others share is never twice the same.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field

import torch

from app.bench.ceilings import ProductCeiling, ReadCeiling
from app.bench.console import Advance, progress
from app.bench.driver import Driver
from app.bench.stats import Figure, Outcome, percentile
from app.bench.workload import Deck
from app.engine.build import BuiltEngine, build_engine
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan
from app.kernels.linear import Linear
from app.weights.checkpoint import Checkpoint

PREFILL_TOKENS = 512
DECODE_ROWS = (1, 8, 16)
STEPS_PER_ROUND = 20
PREFILLS_PER_ROUND = 3
PREFILL = "prefill"
UNITS_PER_ROUND = len(DECODE_ROWS) + 1  # of progress
READ_TARGET = 0.90  # decode ×1, of the read bandwidth
PREFILL_TARGET = 0.75  # of the product rate
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Weights:
    """What one step must read and multiply: bytes of all products' weights, and multiply-adds (times two) a token and a row of logits."""

    num_bytes: int
    operations_per_token: float
    operations_per_logit_row: float

    def floor_seconds(self, tokens: int, logit_rows: int, ceilings: Ceilings) -> tuple[float, float]:
        """The least time to read the weights once, and to multiply with them."""
        operations = tokens * self.operations_per_token + logit_rows * self.operations_per_logit_row
        return self.num_bytes / ceilings.read, operations / ceilings.product


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second, as they were just now."""

    read: float
    product: float


@dataclass(slots=True)
class Samples:
    """Of one workload: seconds of each step (of each prompt for prefill), and each round's share of the two ceilings."""

    tokens: int
    logit_rows: int
    seconds: list[float] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    product_shares: list[float] = field(default_factory=list)


def weights_of(model: torch.nn.Module, vocab_size: int) -> Weights:
    """Counted from the layers themselves, as they are held."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    output = [layer for layer in layers if layer.out_features == vocab_size]
    inner = [layer for layer in layers if layer.out_features != vocab_size]
    return Weights(
        num_bytes=sum({id(layer.form): layer.form.nbytes for layer in layers}.values()),
        operations_per_token=2.0 * sum(layer.in_features * layer.out_features for layer in inner),
        operations_per_logit_row=2.0 * sum(layer.in_features * layer.out_features for layer in output),
    )


@dataclass(slots=True)
class Run:
    """Everything that is measured, as far as it has come."""

    workloads: dict[str, Samples]
    reads: list[float] = field(default_factory=list)
    products: dict[torch.dtype, list[float]] = field(default_factory=lambda: defaultdict(list))
    complete: bool = False


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, rounds: int) -> Outcome:
    """Builds the engine as serving does and measures it on this thread."""
    vocab_size = checkpoint.model_config.vocab_size
    with progress(rounds * UNITS_PER_ROUND + 1, "loading") as advance:
        started = time.perf_counter()
        built = build_engine(checkpoint, plan, (), lambda stage: None)
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        run = measure_engine(built, vocab_size, plan.threads.value, rounds, advance)
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__, "load_seconds": load_seconds}
    return outcome_of(run, f"{checkpoint.name}, {plan.precision.value}, {plan.threads.value} threads", details)


def measure_engine(built: BuiltEngine, vocab_size: int, threads: int, rounds: int, advance: Advance) -> Run:
    """Rounds of every workload between two samples of each ceiling. Ctrl-C keeps the rounds that are done."""
    driver = Driver(built.engine, Deck(range(2, vocab_size)))
    weights = weights_of(built.model, vocab_size)
    run = Run({f"decode ×{rows}": Samples(rows, rows) for rows in DECODE_ROWS} | {PREFILL: Samples(PREFILL_TOKENS, 1)})
    with closing(ReadCeiling(threads)) as reading, torch.inference_mode():
        products = {dtype: ProductCeiling(dtype) for dtype in DTYPES}
        try:
            for _ in range(rounds):
                for name, samples in run.workloads.items():
                    before = _ceilings(run, reading, products, built.backend.dtype)
                    seconds = _work(driver, name, samples)
                    after = _ceilings(run, reading, products, built.backend.dtype)
                    _hold(samples, seconds, weights, Ceilings(max(before.read, after.read), max(before.product, after.product)))
                    advance(name)
            run.complete = True
        except KeyboardInterrupt:
            pass
    return run


def _work(driver: Driver, name: str, samples: Samples) -> list[float]:
    if name == PREFILL:
        return [driver.prefill(samples.tokens) for _ in range(PREFILLS_PER_ROUND)]
    return driver.decode(samples.tokens, STEPS_PER_ROUND)


def _ceilings(run: Run, reading: ReadCeiling, products: dict[torch.dtype, ProductCeiling], dtype: torch.dtype) -> Ceilings:
    run.reads.append(reading.sample())
    for kind, ceiling in products.items():
        run.products[kind].append(ceiling.sample())
    return Ceilings(run.reads[-1], run.products[dtype][-1])


def _hold(samples: Samples, seconds: list[float], weights: Weights, ceilings: Ceilings) -> None:
    """One round's samples against the ceilings that stood on both sides of it."""
    samples.seconds += seconds
    read, product = weights.floor_seconds(samples.tokens, samples.logit_rows, ceilings)
    samples.read_shares.append(read / statistics.median(seconds))
    samples.product_shares.append(product / statistics.median(seconds))


def outcome_of(run: Run, subject: str, details: dict[str, object]) -> Outcome:
    """Figures for people, the ceilings first."""
    figures = [Figure("memory read", statistics.median(run.reads) / 1e9, "GB/s")] if run.reads else []
    for dtype, rates in run.products.items():
        figures.append(Figure(f"products, {str(dtype).removeprefix('torch.')}", statistics.median(rates) / 1e9, "GFLOP/s"))
    for name, samples in run.workloads.items():
        if samples.seconds:
            figures += _figures(name, samples)
    return Outcome("engine", subject, tuple(figures), details, run.complete)


def _figures(name: str, samples: Samples) -> list[Figure]:
    middle = statistics.median(samples.seconds)
    what = f"prefill {samples.tokens}" if name == PREFILL else name
    read, product = statistics.median(samples.read_shares), statistics.median(samples.product_shares)
    bound, share = ("memory read", read) if read >= product else ("product rate", product)
    target = READ_TARGET if name == "decode ×1" else PREFILL_TARGET if name == PREFILL else None
    return [
        Figure(
            f"{what}, a {'prompt' if name == 'prefill' else 'step'}",
            middle * 1e3,
            "ms",
            p99=percentile(samples.seconds, 0.99) * 1e3,
        ),
        Figure(what, samples.tokens / middle, "tok/s", ratio=share, against=bound, target=target, is_share=True),
    ]
