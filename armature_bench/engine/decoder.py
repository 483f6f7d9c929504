"""The decoder engine without a server, stepped by the bench and compared with the machine's ceilings.

Samples of the ceilings alternate with the work in one run, because the speed of a shared machine changes.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from app.backends.base import BaseBackend
from app.engine.build import BuildRequest, BuiltEngine
from app.engine.decoder.build import build_decoder_engine, build_device_decoder_engine
from app.engine.decoder.engine import DecoderEngine
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan
from app.models.decoders.decoder import Decoder
from app.weights.checkpoint import Checkpoint
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, progress
from armature_bench.engine.ceilings import (
    DTYPES,
    CeilingSampler,
    CpuCeilingSampler,
    DeviceCeilingSampler,
    WorkSamples,
    mean_ceilings,
)
from armature_bench.engine.driver import PROMPT_TOKENS, DecoderDriver, largest_cache_bytes, product_costs
from armature_bench.http.workload import TokenPrompts

DECODE_ROWS = (1, 2, 4, 8, 16, 32)
DEVICE_ROWS = (1, 8, 64, 256)  # a device with its own memory needs far more sequences to be busy
PROMPTS = (128, 512, 2048)
DEVICE_PROMPTS = 8  # prompts prefilled together: one alone does not keep such a device busy
STEPS_PER_ROUND = 20
TOKENS_PER_ROUND = 1536  # prefill tokens per round: several short prompts or one long one
INTEGER_PRECISIONS = ("int8", "int4")  # precisions with integer products
TARGETS = {"decode ×1": 0.90, "prefill 512": 0.75}  # shares of the read bandwidth and of the product rate
STEADY_STEPS = 1000  # number of steps from which on jitter is reported
JITTER_TARGET = 1.5  # p99 / p50
OUTLIERS_SHOWN = 10
BEAM_TARGET_MS = 100.0  # of a step: a person who waits for the text notices longer ones


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """Options of the bench: repetitions, and loads if the user named some.

    If `rows`, `prompts`, `contexts` or `beam_width` are given, only these are measured. `steps` is the total per load,
    over all rounds.
    """

    rounds: int
    rows: Sequence[int] = ()
    prompts: Sequence[int] = ()
    contexts: Sequence[int] = ()
    steps: int | None = None
    beam_width: int | None = None

    @property
    def steps_per_round(self) -> int:
        return STEPS_PER_ROUND if self.steps is None else math.ceil(self.steps / self.rounds)

    def loads(self, plan: ServingPlan) -> list[DecoderLoad]:
        """Return the named loads, or else all standard loads that the plan can serve."""
        if self.rows or self.prompts or self.contexts or self.beam_width:
            return [
                *(DecoderLoad(rows, rows) for rows in self.rows),
                *(DecoderLoad(1, 1, context=tokens) for tokens in self.contexts),
                *(DecoderLoad(tokens, 1, prompt=True) for tokens in self.prompts),
                *(DecoderLoad(width, width, beams=True) for width in filter(None, [self.beam_width])),
            ]
        on_device = plan.placement.device != "cpu"
        rows = [rows for rows in (DEVICE_ROWS if on_device else DECODE_ROWS) if rows <= plan.memory.max_running_seqs]
        prompts = [tokens for tokens in PROMPTS if tokens < plan.memory.max_model_len]
        together = [DecoderLoad(prompts[-1], DEVICE_PROMPTS, prompt=True)] if on_device and prompts else []
        return [*EngineBenchOptions(self.rounds, rows, prompts).loads(plan), *together]


@dataclass(frozen=True, slots=True)
class DecoderLoad:
    """One load: sequences that decode together, the beams of one search, or prompts to prefill.

    `tokens` is the number of tokens per step, or per prompt. `logit_rows` is the number of rows of logits: one per
    sequence or prompt. `context`: the tokens before the decoded ones, if they were asked for.
    """

    tokens: int
    logit_rows: int
    prompt: bool = False
    beams: bool = False
    context: int | None = None

    @property
    def name(self) -> str:
        """Name of the load in tables, such as `decode ×8`."""
        if self.beams:
            return f"beam search ×{self.tokens}"
        if not self.prompt:
            return f"decode ×{self.tokens}" + (f" after {self.context:,}" if self.context else "")
        return f"prefill {self.tokens}" if self.logit_rows == 1 else f"prefill {self.logit_rows} × {self.tokens}"

    @property
    def all_tokens(self) -> int:
        """Number of tokens of the step, or of all prompts together."""
        return self.tokens * self.logit_rows if self.prompt else self.tokens


SamplesByLoad = dict[DecoderLoad, WorkSamples]


def measure_decoder_engine(
    checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, options: EngineBenchOptions
) -> BenchOutcome:
    """Build the engine as for serving, but without speculation, and measure it on this thread."""
    plan = plan.changed(speculation=False)  # steps with one token of each sequence are timed
    loads = options.loads(plan)
    with progress(options.rounds * len(loads) + 1, "loading") as advance:
        started = time.perf_counter()
        built = build_planned_decoder(checkpoint, plan)
        load_seconds = time.perf_counter() - started
        advance("ceilings")
        machine = ceiling_sampler(plan, built.backend)
        driver = DecoderDriver(
            built.engine, TokenPrompts(range(2, checkpoint.model_config.vocab_size)), plan.memory.max_model_len
        )
        weights = product_costs(
            built.model, checkpoint.model_config.vocab_size, largest_cache_bytes(facts, built.backend.device)
        )
        measured = {
            load: WorkSamples(weights.read_bytes(load.all_tokens), weights.operations(load.all_tokens, load.logit_rows))
            for load in loads
        }
        with closing(machine), torch.inference_mode(), gc_disabled():
            complete = _rounds(options, driver, measured, machine, advance)
    taken = {load: samples for load, samples in measured.items() if samples.seconds}
    states = 8 * sum(built.runner.kv_cache.shape.state_sizes)  # fp32 states are read and written
    decoded = min(options.steps_per_round, driver.segment_steps) / 2

    def kv_bytes(load: DecoderLoad) -> float:
        return float(built.runner.kv_cache.bytes_per_token * ((load.context or PROMPT_TOKENS) + decoded) + states)

    details = {
        "machine": facts.to_json(),
        "plan": plan.to_json(),
        "torch": torch.__version__,
        "load_seconds": load_seconds,
    }
    steps = {load.name: [round(seconds, 7) for seconds in samples.seconds] for load, samples in taken.items()}
    subject = f"{checkpoint.name}, {plan.weights.precision}, {device_label(plan)}"
    figures = (
        *machine.figures(),
        *(figure for load in taken for figure in _load_figures(load, taken[load], kv_bytes(load))),
        *_context_figures(taken),
    )
    notes = tuple(note for load, samples in taken.items() for note in _outliers(load, samples))
    return BenchOutcome("engine", subject, figures, details | {"step_seconds": steps}, complete, notes)


def build_planned_decoder(checkpoint: Checkpoint, plan: ServingPlan) -> BuiltEngine[DecoderEngine, Any, Decoder]:
    request = BuildRequest(checkpoint, plan)
    return build_decoder_engine(request) if plan.placement.device == "cpu" else build_device_decoder_engine(request)


def ceiling_sampler(plan: ServingPlan, backend: BaseBackend, others: Iterable[torch.dtype] = DTYPES) -> CeilingSampler:
    """Return the sampler of the ceilings for the plan's device.

    On the processor, product rates of the `others` dtypes are sampled besides the engine's own dtype.
    """
    if plan.placement.device != "cpu":
        return DeviceCeilingSampler(backend)
    own = torch.int8 if plan.weights.precision in INTEGER_PRECISIONS else backend.dtype
    return CpuCeilingSampler(plan.cpu.threads, own, {own, *others})


def device_label(plan: ServingPlan) -> str:
    """Return the plan's number of threads, or its device, for titles."""
    return f"{plan.cpu.threads} threads" if plan.placement.device == "cpu" else plan.placement.device


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection while steps run, as serving does."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _rounds(
    options: EngineBenchOptions,
    driver: DecoderDriver,
    measured: SamplesByLoad,
    machine: CeilingSampler,
    advance: AdvanceProgress,
) -> bool:
    """Run every load in every round, with a sample of the ceilings between any two loads.

    Ctrl-C stops early, keeps the measurements, and makes the result False.
    """
    try:
        machine.sample_other_dtypes()
        for _ in range(options.rounds):
            before = machine.sample()
            for load, samples in measured.items():
                seconds = _work(driver, load, options.steps_per_round)
                after = machine.sample()
                samples.add_round(seconds, mean_ceilings(before, after))
                before = after
                advance(load.name)
    except KeyboardInterrupt:
        return False
    return True


def _work(driver: DecoderDriver, load: DecoderLoad, steps: int) -> list[float]:
    if load.prompt:
        return [driver.prefill(load.tokens, load.logit_rows) for _ in range(max(1, TOKENS_PER_ROUND // load.tokens))]
    if load.beams:
        return driver.beam_search(load.tokens, steps)
    return driver.decode(load.tokens, steps, load.context or PROMPT_TOKENS)


def _context_figures(taken: SamplesByLoad) -> Iterator[Figure]:
    """Yield the times after each context over the time after the shortest."""
    loads = sorted((load for load in taken if load.context), key=lambda load: load.context or 0)
    for load in loads[1:]:
        yield Figure(f"{load.name}, over {loads[0].context:,}", taken[load].middle / taken[loads[0]].middle, "times")


def _load_figures(load: DecoderLoad, samples: WorkSamples, kv_bytes: float) -> Iterator[Figure]:
    """Yield the rows of one load. `kv_bytes` is one sequence's keys, values and states in the middle of its run."""
    bound, share = samples.bound
    parts = {"tok/s": load.all_tokens / samples.middle}
    if not load.prompt and samples.num_bytes:
        parts["of read"] = samples.read_share
        parts["with KV"] = samples.read_share * (1 + load.tokens * kv_bytes / samples.num_bytes)
        parts["MB/token"] = samples.num_bytes / load.tokens / 1e6
    parts["of products"] = samples.product_share
    yield Figure(
        load.name,
        samples.middle * 1e3,
        "ms",
        p99=samples.p99 * 1e3,
        ratio=share,
        against=bound,
        target=TARGETS.get(load.name) if load.prompt or samples.num_bytes else None,
        is_share=True,
        parts=parts,
    )
    if load.beams:
        yield Figure(f"{load.name}, p99", samples.p99 * 1e3, "ms", target=BEAM_TARGET_MS, at_most=True)
    if not load.prompt and len(samples.seconds) >= STEADY_STEPS:
        yield Figure(f"{load.name}, p99/p50", samples.p99 / samples.middle, "times", target=JITTER_TARGET, at_most=True)


def _outliers(load: DecoderLoad, samples: WorkSamples) -> Iterator[str]:
    """Yield a note that lists the steps far slower than the median, slowest first.

    Step numbers are listed so that periodic patterns can be seen.
    """
    limit = JITTER_TARGET * samples.middle
    slow = sorted((-seconds, index) for index, seconds in enumerate(samples.seconds) if seconds > limit)
    if slow and not load.prompt and len(samples.seconds) >= STEADY_STEPS:
        listed = ", ".join(f"#{index} {-seconds * 1e3:.1f} ms" for seconds, index in slow[:OUTLIERS_SHOWN])
        more = " …" if len(slow) > OUTLIERS_SHOWN else ""
        yield f"{load.name}: {len(slow)} of {len(samples.seconds):,} steps took over {JITTER_TARGET:g} times the median: {listed}{more}"
