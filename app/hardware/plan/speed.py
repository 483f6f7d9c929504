"""Step times and speeds: measured or estimated, and what they say about the server before its first request.

`TrialTimings` are the valid measurements. A configuration that was not timed is estimated: a step reads every weight
once and multiplies each row with all of them, so its time follows from the bytes, the operations and the machine's two
ceilings, which are measured or else conservative figures by instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.hardware.decision import Decided, Decision, Measurements, PlanPart, TrialTimes, format_bytes, format_count
from app.hardware.facts import Facts, Needs
from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.hardware.probe.software import TORCH_KERNELS
from app.hardware.step_times import TABLE_TEXT_TOKENS, StepTimeTable
from armature_kernels.linear.torchao_config import KLEIDI_INT4

FEW_SEQS, SEVERAL_SEQS = 1, 8  # sequences that decode together, typical for services on a CPU
TYPICAL_CONTEXT = 512  # tokens of context of a sequence, for stated speeds
PROMPT_TOKENS = 512  # tokens of a prompt, or of texts, with which two configurations are compared
FEW_TOKENS = 16  # tokens of one short text


TimingSource = Literal["measured", "noisy", "one step", "estimated"]

# Bytes that a core reads in a second, and all cores of a memory node together. Two cores of a Cascade Lake server read
# 17 GB/s, of Zen 5 45 to 80; servers of that age have six or eight channels for a node.
_CORE_READS, _NODE_READS = 8e9, 100e9
# The same for other processors, by the beginning of the core's name: boards with one narrow channel, and Apple's chips.
_OTHER_READS = {"Cortex-A": (3e9, 12e9), "Apple": (20e9, 60e9)}

# Operations of a core in a second, a multiply and an add counted as two, in products of many rows: less than half of
# what was measured where a machine with that level was at hand.
_LEVEL_INTEGERS = {
    "amx": 500e9,
    "avx512bf16": 200e9,
    "avx512": 200e9,
    "avxvnni": 60e9,
    "avx2": 30e9,
    "portable": 5e9,
    "i8mm": 100e9,
    "dotprod": 50e9,
    "neon": 15e9,
}
_NEWER_LEVEL_INTEGERS = 200e9  # a level that is not in the table was added for a newer processor
_FP32 = (("avx512f", 35e9), ("avx2", 20e9), ("neon", 15e9))
_OTHER_FP32 = 8e9
_BF16 = (("amx_bf16", 500e9), ("avx512_bf16", 100e9), ("bf16", 40e9))
_WIDENED_SHARE = 0.9  # of FP32's rate, where bf16 weights are widened
# Of the rate of eight bits: codes are unpacked before they are multiplied. Without VNNI, AVX2 sums eight products of four
# bits in 16 bits, and one of eight bits: 1.55 times as many operations on Zen 2.
_INT4_SHARE, _INT4_SHARE_AVX2 = 0.8, 1.5
_REACHED_SHARE = 0.5  # of a measured rate of integer products: steps also scale rows and unpack codes

_STEP_SECONDS = 0.0003  # work of a step besides its products
# Least measured time of single steps over their estimates from which they count as disturbed: a step that shares its
# cores with another process waits at each product for a slice of the scheduler, and takes ten times as long.
_DISTURBED = 4.0
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT_TOKENS = (32, 64, 128, 256, 512)
_TEXT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_PROGRAM_ROWS = (1, 2, 4, 8, 16, 32)

_UNKNOWN = "Known when a model is given and the machine is measured."
_NOT_GENERATING = "This model does not generate: see capacity and roofline for its expected speed."
INT8_COPY_ROWS = 128  # steps of more rows use the 8-bit copy, if there is one
_LabelledRatios = tuple[dict[str, float], dict[str, str]]  # ratios and descriptions of the steps, by phase


@dataclass(frozen=True, slots=True)
class TrialTiming:
    """Valid trial with its table of step times.

    `source`: measured, measured with samples that varied too much, estimated, or estimated and scaled to one measured
    step.
    """

    trial: TrialTimes
    steps: StepTimeTable
    source: TimingSource = "measured"

    def decode_rate(self, rows: int) -> float:
        return rows / self.steps.decode(rows)

    def prefill_rate(self, tokens: int) -> float:
        """Return tokens a second of a prompt in steps of `tokens` tokens."""
        return tokens / self.steps.prefill(tokens)

    def encode_rate(self, tokens: int) -> float:
        """Return tokens a second of texts in steps of `tokens` tokens."""
        return tokens / self.steps.encode(tokens)

    def speedup_over(self, other: TrialTiming) -> float:
        """Return the geometric mean speedup over one sequence, several and a prompt, or few and many tokens."""
        tokens = self.compared_tokens(other)
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, *(self._table.keys() & other._table.keys()), tokens)
            gains = [self.encode_rate(size) / other.encode_rate(size) for size in (few, tokens)]
        else:
            gains = [self.decode_rate(rows) / other.decode_rate(rows) for rows in (FEW_SEQS, SEVERAL_SEQS)]
            gains.append(self.prefill_rate(tokens) / other.prefill_rate(tokens))
        return float(math.prod(gains) ** (1 / len(gains)))

    def compared_tokens(self, other: TrialTiming, most: int = PROMPT_TOKENS) -> int:
        """Return the step size at which prompts or texts are compared: the largest with which both were timed."""
        both = self._table.keys() & other._table.keys()
        return max((size for size in both if size <= most), default=most)

    def describe_rates(self, tokens: int) -> str:
        """Return the rates as part of a sentence."""
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, tokens, *self.trial.encode_seconds)
            return (
                f"{format_rate(self.encode_rate(few))} a second in steps of {few} and "
                f"{format_rate(self.encode_rate(tokens))} of {tokens}"
            )
        return (
            f"{format_rate(self.decode_rate(FEW_SEQS))} tokens/s at one sequence, "
            f"{format_rate(self.decode_rate(SEVERAL_SEQS))} at {SEVERAL_SEQS} "
            f"and {format_rate(self.prefill_rate(tokens))} of a prompt"
        )

    @property
    def num_sizes(self) -> int:
        """Number of step sizes that were timed."""
        return len(self.trial.decode_seconds) + len(self._table)

    @property
    def _table(self) -> Mapping[int, float]:
        return self.trial.encode_seconds or self.trial.prefill_seconds


@dataclass(frozen=True, slots=True)
class TrialTimings:
    """Valid timings. The `noisy` ones serve as better estimates and decide nothing else."""

    known: tuple[TrialTiming, ...] = ()
    noisy: tuple[TrialTiming, ...] = ()

    @classmethod
    def from_measurements(cls, measurements: Measurements | None) -> TrialTimings:
        """Return the valid timings among the measurements."""
        if measurements is None or measurements.fallback:
            return cls()
        valid = [trial for trial in measurements.trials if _is_valid(trial)]
        return cls(
            tuple(TrialTiming(trial, StepTimeTable.from_trial(trial)) for trial in valid if not trial.noise),
            tuple(TrialTiming(trial, StepTimeTable.from_trial(trial), "noisy") for trial in valid if trial.noise),
        )

    def find(self, precision: str, threads: int, *, int8_copy: bool = False) -> TrialTiming | None:
        """Return the timing of a configuration with the most step sizes, or None."""
        wanted = (precision, threads, int8_copy)
        found = [one for one in self.known if (one.trial.precision, one.trial.threads, one.trial.int8_copy) == wanted]
        return max(found, key=lambda one: one.num_sizes, default=None)

    def find_noisy(self, precision: str, threads: int) -> TrialTiming | None:
        return TrialTimings(self.noisy).find(precision, threads)

    def find_served(self, precision: str, threads: int, *, int8_copy: bool) -> TrialTiming | None:
        """Return the timing of a configuration; if the int8 copy was not timed, the timing without it."""
        return self.find(precision, threads, int8_copy=int8_copy) or self.find(precision, threads)

    def fewer_threads(self, precision: str, threads: int) -> list[TrialTiming]:
        """Return the timings without int8 copy that have fewer threads."""
        without_copy = [one for one in self.known if one.trial.precision == precision and not one.trial.int8_copy]
        return [one for one in without_copy if one.trial.threads < threads]


NO_TRIALS = TrialTimings()  # nothing was measured


def describe_sources(compared: Mapping[str, TrialTiming]) -> str:
    """Return sentences, after a space, on precisions that were not timed, not well or not beyond one step."""
    estimated = [name for name, timing in compared.items() if timing.source == "estimated"]
    noisy = [name for name, timing in compared.items() if timing.source == "noisy"]
    single = [name for name, timing in compared.items() if timing.source == "one step"]
    verb = "was" if len(estimated) == 1 else "were"
    return f" {' and '.join(estimated)} {verb} not timed but estimated from bytes and operations." * bool(estimated) + (
        f" Of {' and '.join(single)} only one step was timed." * bool(single)
        + f" The times of {' and '.join(noisy)} are the least of samples that varied too much." * bool(noisy)
    )


def format_rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _is_valid(trial: TrialTimes) -> bool:
    tables: Iterable[Mapping[int, float]] = (trial.decode_seconds, trial.prefill_seconds)
    if trial.encode_seconds:
        tables = (trial.encode_seconds,)
    extra = (trial.context_token_seconds, trial.pair_seconds, trial.operations_per_token, float(trial.read_bytes))
    return (
        trial.threads >= 1
        and all(table and all(rows > 0 and 1e-9 < seconds < 1e6 for rows, seconds in table.items()) for table in tables)
        and all(math.isfinite(number) and number >= 0 for number in extra)
    )


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """What an estimate depends on. `level` is that of the native kernels, or the name of others."""

    facts: Facts
    needs: Needs | None
    level: str
    device: str = "cpu"
    measurements: Measurements | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and operations computed in a second; `measured` if both were measured on this machine."""

    read_bytes_per_second: float
    products_per_second: float
    measured: bool = False


def known_timing(inputs: EstimateInputs, precision: str, threads: int) -> TrialTiming | None:
    """Return the measured timing of a precision, a noisy one, the estimate scaled to one step, or the estimate.

    If other precisions were measured slower or faster than their estimates, this one is expected to be so too. Noisy
    timings and single steps that all took several times as long as estimated say only that other work used the cores:
    they are ignored. None: the model, its bytes in this precision or the machine's products are not known.
    """
    timings = TrialTimings.from_measurements(inputs.measurements)
    timing = timings.find(precision, threads)
    if timing is not None:
        return timing
    estimate = estimated_timing(inputs, precision, threads)
    if estimate is None:
        return timings.find_noisy(precision, threads)
    one, correction = _single_step(inputs.measurements, precision), _correction(inputs, threads)
    noisy = timings.find_noisy(precision, threads)
    if correction > _DISTURBED and not any(timing.trial.decode_seconds for timing in timings.known):
        one, noisy, correction = None, None, 1.0
    if inputs.needs is not None and inputs.needs.kind == "program":
        one = None  # how its steps grow with their rows is not known from one of them
    if noisy is not None:
        return noisy
    factor = max(correction, _least_factor(inputs, estimate)) if one is None else one / estimate.steps.decode(FEW_SEQS)
    source: TimingSource = "estimated" if one is None else "one step"
    return TrialTiming(_scaled(estimate.trial, factor), estimate.steps.scaled(factor), source)


def _correction(inputs: EstimateInputs, threads: int) -> float:
    """Return the least measured time of a decode step of one sequence over its estimate; 1 if nothing was measured."""
    measured = inputs.measurements
    if measured is None or measured.fallback:
        return 1.0
    took = {name: seconds for name in measured.single_steps if (seconds := _single_step(measured, name))}
    for timing in _decoding_trials(inputs):
        if timing.trial.threads == threads:
            took[timing.trial.precision] = timing.steps.decode(FEW_SEQS)
    estimates = {name: estimated_timing(inputs, name, threads) for name in took}
    factors = [took[name] / one.steps.decode(FEW_SEQS) for name, one in estimates.items() if one is not None]
    return min(factors, default=1.0)


def _least_factor(inputs: EstimateInputs, estimate: TrialTiming) -> float:
    """Return the least factor with which a step reads its weights no faster than the machine has shown.

    A correction can be far too small: if other work slowed down the products that were timed for the ceilings.
    """
    rates = _shown_reads(inputs)
    measured = None if inputs.measurements is None else _finite_positive(inputs.measurements.read_bytes_per_second)
    if measured is not None:
        rates.append(measured)
    estimated = estimate.steps.decode(FEW_SEQS)
    return estimate.trial.read_bytes / max(rates) / estimated if rates and estimated > 0 else 0.0


def estimated_timing(inputs: EstimateInputs, precision: str, threads: int) -> TrialTiming | None:
    """Return the estimated timing of a precision; None if there is too little to estimate it from."""
    needs = inputs.needs
    nbytes = _read_bytes(inputs, precision)
    ceilings = find_ceilings(inputs, precision, threads)
    if needs is None or nbytes is None or ceilings is None or needs.rows_vary:
        return None
    operations = needs.operations_per_token or 2.0 * needs.num_parameters
    reading = nbytes / ceilings.read_bytes_per_second
    convolving = needs.convolution_operations / _convolution_rate(inputs, precision, threads, ceilings)

    def table(sizes: tuple[int, ...], output: float = 0.0) -> dict[int, float]:
        each = convolving + (operations - needs.convolution_operations + output) / ceilings.products_per_second
        return {size: _STEP_SECONDS + reading * needs.read_share(size) + size * each for size in sizes}

    texts = _PROGRAM_ROWS if needs.kind == "program" else _TEXT_TOKENS
    plain = "fp32" if precision == "fp32" else "bf16"
    trial = TrialTimes(
        precision,
        threads,
        # of a prompt only the last row needs the output layer
        decode_seconds=table(_DECODE_ROWS, 2.0 * needs.vocab_size * needs.hidden_size) if needs.generates else {},
        prefill_seconds=table(_PROMPT_TOKENS) if needs.generates else {},
        encode_seconds={} if needs.generates else table(texts),
        context_token_seconds=kv_bytes_per_token(needs, plain) / ceilings.read_bytes_per_second,
        read_bytes=round(nbytes * needs.read_share(1)),
        operations_per_token=operations,
    )
    return TrialTiming(trial, StepTimeTable.from_trial(trial), source="estimated")


def _convolution_rate(inputs: EstimateInputs, precision: str, threads: int, ceilings: Ceilings) -> float:
    """Return the operations a second of convolutions, which torch computes: in FP32 beside quantized linear layers."""
    if inputs.device != "cpu" or precision == "fp32" or inputs.needs is None or not inputs.needs.convolution_operations:
        return ceilings.products_per_second
    if precision == "bf16":
        found = find_ceilings(replace(inputs, level=TORCH_KERNELS, measurements=None), precision, threads)
    else:
        found = find_ceilings(inputs, "fp32", threads)
    return ceilings.products_per_second if found is None else found.products_per_second


def find_ceilings(inputs: EstimateInputs, precision: str, threads: int) -> Ceilings | None:
    """Return the ceilings for a precision; None if they are not known, or if nothing here multiplies it well.

    Measured ones are used even if steps varied too much. A read rate that was not measured is what steps have shown.
    """
    measured = inputs.measurements or Measurements()
    read = _finite_positive(measured.read_bytes_per_second)
    products = _finite_positive(measured.products_per_second.get(precision))
    if inputs.device != "cpu":
        return None if read is None or products is None else Ceilings(read, products, measured=True)
    per_core = _products_per_core(inputs, precision)
    if per_core is None:
        return None
    if products is not None and precision not in ("fp32", "bf16", "fp16"):
        products *= _REACHED_SHARE
    cores = _usable_cores(inputs.facts, threads)
    return Ceilings(
        read or max([_reads(inputs.facts, cores), *_shown_reads(inputs)]),
        products or cores * per_core,
        measured=read is not None and products is not None,
    )


def _shown_reads(inputs: EstimateInputs) -> list[float]:
    """Return the rates at which steps of one sequence that were timed read their weights, in bytes a second."""
    measured = inputs.measurements or Measurements()
    shown = [timing.trial.read_bytes / timing.steps.decode(FEW_SEQS) for timing in _decoding_trials(inputs)]
    for name in () if measured.fallback else measured.single_steps:
        seconds, nbytes = _single_step(measured, name), _read_bytes(inputs, name)
        share = 1.0 if inputs.needs is None else inputs.needs.read_share(1)
        shown += [share * nbytes / seconds] if seconds and nbytes else []
    return [rate for rate in shown if rate > 0]


def _decoding_trials(inputs: EstimateInputs) -> list[TrialTiming]:
    timings = TrialTimings.from_measurements(inputs.measurements)
    return [timing for timing in (*timings.known, *timings.noisy) if timing.trial.decode_seconds]


def _usable_cores(facts: Facts, threads: int) -> float:
    quota = facts.cgroup.quota_cores
    return threads if quota is None else min(quota, threads)


def _reads(facts: Facts, cores: float) -> float:
    core_name = facts.cpu.microarchitecture or facts.cpu.vendor
    each, most = next((rates for name, rates in _OTHER_READS.items() if core_name.startswith(name)), (0.0, 0.0))
    return min((each or _CORE_READS) * cores, most or _NODE_READS)


def _products_per_core(inputs: EstimateInputs, precision: str) -> float | None:
    """Return the operations of a core in a second; None for quantized weights without native kernels."""
    isa = inputs.facts.isa
    plain = next((rate for name, rate in _FP32 if name in isa), _OTHER_FP32)
    if precision == "fp32":
        return plain
    if precision in ("bf16", "fp16"):  # without such products our kernels widen weights in registers, torch's in memory
        widened = plain / 2 if inputs.level == TORCH_KERNELS else _WIDENED_SHARE * plain
        return next((rate for name, rate in _BF16 if name in isa), widened)
    if inputs.level == TORCH_KERNELS:
        return None
    integers = _LEVEL_INTEGERS.get(inputs.level, _NEWER_LEVEL_INTEGERS)
    four_bits = (_INT4_SHARE_AVX2 if inputs.level == "avx2" else _INT4_SHARE) * integers
    return integers if precision == "int8" else four_bits


def _read_bytes(inputs: EstimateInputs, precision: str) -> int | None:
    """Return the bytes of weights that a step reads: all except tables of which it reads some rows."""
    needs = inputs.needs
    if needs is None:
        return None
    held = {**needs.bytes_by_precision, **(needs.device_bytes_by_precision if inputs.device != "cpu" else {})}
    size = held.get("int4" if precision in KLEIDI_INT4.values() else precision)
    return None if size is None else max(size - needs.table_bytes, 1)


def _single_step(measurements: Measurements | None, precision: str) -> float | None:
    if measurements is None or measurements.fallback:
        return None
    return _finite_positive(measurements.single_steps.get(precision))


def _scaled(trial: TrialTimes, factor: float) -> TrialTimes:
    decode, prefill, encode = (
        {size: seconds * factor for size, seconds in table.items()}
        for table in (trial.decode_seconds, trial.prefill_seconds, trial.encode_seconds)
    )
    return replace(
        trial,
        decode_seconds=decode,
        prefill_seconds=prefill,
        encode_seconds=encode,
        context_token_seconds=trial.context_token_seconds * factor,
    )


def _finite_positive(number: float | None) -> float | None:
    return number if number is not None and 0 < number < math.inf else None


def by_expected_speed(inputs: EstimateInputs, names: Sequence[str], threads: int) -> list[str]:
    """Return precisions by expected geometric mean speed, the fastest first; unknown ones come last."""
    known = {name: known_timing(inputs, name, threads) for name in names}
    fastest = next((timing for timing in known.values() if timing is not None), None)

    def slowness(name: str) -> float:
        timing = known[name]
        return math.inf if timing is None or fastest is None else fastest.speedup_over(timing)

    return sorted(known, key=slowness)


@dataclass(frozen=True)
class SpeedEstimate(PlanPart):
    """Expected speed, empty where it is not known.

    Capacity is by phase (`prefill`, `decode`, `encode`) and rows of a step. Ratios to the limit are by phase, with
    `decode_full` for the most rows and `encode_few` for the fewest tokens. `speed_source` is measured, noisy, estimated
    or unknown.
    """

    speed_source: Decided[str] = Decided()

    decode_tokens_per_second: Decided[float | None] = Decided()
    prefill_tokens_per_second: Decided[float | None] = Decided()
    capacity_tokens_per_second: Decided[Mapping[str, Mapping[int, float]]] = Decided()
    roofline_ratio: Decided[Mapping[str, float]] = Decided()


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """Largest steps, and the bytes of the weights in memory."""

    batch_tokens: int
    running_seqs: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class SpeedInputs:
    """The model that will be served, with the measured times of its configuration."""

    needs: Needs | None
    precision: str
    limits: SpeedLimits
    timing: TrialTiming | None = None


def estimate_speed(measurements: Measurements | None, served: SpeedInputs) -> SpeedEstimate:
    """Work out the expected speed; measurements that were rejected are not used."""
    valid = None if measurements is None or measurements.fallback else measurements
    return SpeedEstimate(
        speed_source=_source(measurements, served.timing),
        decode_tokens_per_second=_decode_ceiling(valid, served),
        prefill_tokens_per_second=_prefill_ceiling(valid, served),
        capacity_tokens_per_second=_capacity(served),
        roofline_ratio=_roofline(valid, served),
    )


def _source(measurements: Measurements | None, timing: TrialTiming | None) -> Decision[str]:
    if timing is None:
        return Decision("unknown", "There are neither measurements nor figures to estimate step times from.")
    if timing.source == "measured":
        when = " while the server was idle" if measurements is not None and measurements.is_partial else ""
        return Decision("measured", f"Steps were timed{when}; recent steps correct the figures.")
    if timing.source == "noisy":
        return Decision(
            "noisy",
            f"Steps were timed, and the least of the samples count, since {timing.trial.noise}. The idle server measures "
            "again; recent steps correct the figures.",
        )
    why = "nothing was measured"
    if measurements is not None:
        why = measurements.fallback or "this configuration was not timed"
    if timing.source == "one step":
        why = "there was time for one step only, to which the estimate is scaled"
    return Decision(
        "estimated",
        f"Capacity and predicted wait are estimated from bytes and operations, since {why}; recent steps correct them.",
    )


def _capacity(served: SpeedInputs) -> Decision[Mapping[str, Mapping[int, float]]]:
    """Return the decode rate by measured rows with a typical context, and the prefill rate by measured step sizes."""
    timing, needs = served.timing, served.needs
    if timing is None or needs is None:
        return Decision({}, _UNKNOWN)
    if timing.trial.encode_seconds:
        return _encoder_capacity(timing, served.limits.batch_tokens, needs.kind == "program")
    context = min(TYPICAL_CONTEXT, max(1, needs.max_model_len // 2))
    rows = _measured_sizes(timing.trial.decode_seconds, served.limits.running_seqs)
    decode = {row: row / timing.steps.decode(row, row * context) for row in rows}
    prefill = {
        size: timing.prefill_rate(size)
        for size in _measured_sizes(timing.trial.prefill_seconds, served.limits.batch_tokens)
    }
    last, step = max(decode), max(prefill)
    return Decision(
        {"decode": decode, "prefill": prefill},
        f"{_steps_phrase(timing)}: {format_rate(decode[min(decode)])} tokens/s at "
        f"{format_count(min(decode), 'sequence')} and {format_rate(decode[last])} at "
        f"{last}, each {context} tokens long, and {format_rate(prefill[step])} of a prompt in steps of {step}.",
    )


def _encoder_capacity(timing: TrialTiming, most: int, of_rows: bool) -> Decision[Mapping[str, Mapping[int, float]]]:
    encode = {size: timing.encode_rate(size) for size in _measured_sizes(timing.trial.encode_seconds, most)}
    few, many = min(encode), max(encode)
    unit = "rows/s" if of_rows else "tokens/s of texts"
    texts = f": {format_rate(encode[many] / TABLE_TEXT_TOKENS)} texts of {TABLE_TEXT_TOKENS} tokens a second"
    rates = (
        f"{format_rate(encode[few])} {unit} in steps of {few}, {format_rate(encode[many])} "
        f"in steps of {many}{'' if of_rows else texts}."
    )
    return Decision({"encode": encode}, f"{_steps_phrase(timing)}: {rates}")


def _steps_phrase(timing: TrialTiming) -> str:
    noisy = "From the least of noisy samples" if timing.source == "noisy" else "Estimated from bytes and operations"
    return "From measured steps" if timing.source == "measured" else noisy


def _measured_sizes(table: Mapping[int, float], most: int) -> list[int]:
    """Return the measured sizes up to `most`, and `most` itself if it is below the largest measured size."""
    known = [size for size in table if size <= most]
    return sorted({*known, min(most, max(table))})


def _roofline(measured: Measurements | None, served: SpeedInputs) -> Decision[Mapping[str, float]]:
    """Return a step's minimum time, of reading weights or products at measured rates, over its measured time."""
    timing = served.timing
    if (
        measured is None
        or timing is None
        or timing.source != "measured"
        or not _finite_positive(measured.read_bytes_per_second)
    ):
        return Decision({}, _UNKNOWN)
    if timing.trial.encode_seconds:
        found, labels = _encode_ratios(measured, timing, served.limits.batch_tokens)
    else:
        found, labels = _decoder_ratios(measured, timing, served.limits)
    valid = {phase: ratio for phase, ratio in found.items() if 0 < ratio <= 1}
    shares = ", ".join(f"{ratio:.0%} {labels[phase]}" for phase, ratio in valid.items())
    wrong = [labels[phase] for phase, ratio in found.items() if ratio > 1]
    left_out = f" Steps {', '.join(wrong)} were measured faster than their limit and are left out (a cache may hold the weights)."
    summary = (
        f"Share of what this machine's memory and products allow: {shares}." if valid else "The limits are not known."
    )
    return Decision(valid, summary + (left_out if wrong else ""))


def _encode_ratios(measured: Measurements, timing: TrialTiming, batch_tokens: int) -> _LabelledRatios:
    sizes = [size for size in timing.trial.encode_seconds if size <= batch_tokens] or [batch_tokens]
    few, many = min(sizes), max(sizes)
    found = {
        name: _min_step_seconds(measured, timing.trial, size) / timing.steps.encode(size)
        for name, size in _encode_phases(few, many)
    }
    return found, {"encode_few": f"in steps of {few}", "encode": f"in steps of {many}"}


def _encode_phases(few: int, many: int) -> list[tuple[str, int]]:
    return [("encode_few", few), ("encode", many)] if few < many else [("encode", many)]


def _decoder_ratios(measured: Measurements, timing: TrialTiming, limits: SpeedLimits) -> _LabelledRatios:
    steps = timing.steps
    most = max((rows for rows in timing.trial.decode_seconds if rows <= limits.running_seqs), default=1)
    size = max(
        (size for size in timing.trial.prefill_seconds if size <= limits.batch_tokens), default=limits.batch_tokens
    )
    found = {
        "decode": _min_step_seconds(measured, timing.trial, 1) / steps.decode(1),
        "decode_full": _min_step_seconds(measured, timing.trial, most) / steps.decode(most),
        "prefill": _min_step_seconds(measured, timing.trial, size) / steps.prefill(size),
    }
    labels = {"decode": "at one sequence", "decode_full": f"at {most}", "prefill": f"with prompts in steps of {size}"}
    return found, labels


def _min_step_seconds(measured: Measurements, trial: TrialTimes, rows: int) -> float:
    assert measured.read_bytes_per_second, "called only if it is known"
    reading = trial.read_bytes / measured.read_bytes_per_second
    products = measured.products_per_second.get(
        "int8" if trial.int8_copy and rows > INT8_COPY_ROWS else trial.precision, 0.0
    )
    return max(reading, trial.operations_per_token * rows / products if products > 0 else 0.0)


def _decode_ceiling(measured: Measurements | None, served: SpeedInputs) -> Decision[float | None]:
    """Return the highest decode rate of one sequence, which reads every weight once for each token."""
    if served.needs is not None and not served.needs.generates:
        return Decision(None, _NOT_GENERATING)
    nbytes = (served.timing.trial.read_bytes if served.timing else 0) or served.limits.weight_bytes
    reads = _finite_positive(measured.read_bytes_per_second) if measured else None
    if reads is None or not nbytes:
        return Decision(None, _UNKNOWN)
    return Decision(
        reads / nbytes,
        f"Measured reads of {reads / 1e9:.0f} GB/s over {format_bytes(nbytes)} of weights: an upper bound for one sequence.",
    )


def _prefill_ceiling(measured: Measurements | None, served: SpeedInputs) -> Decision[float | None]:
    """Return the highest prefill rate; a token needs a multiply and an add for each weight of the layers."""
    if served.needs is not None and not served.needs.generates:
        return Decision(None, _NOT_GENERATING)
    trial = served.timing.trial if served.timing else None
    operations = (trial.operations_per_token if trial else 0.0) or 2.0 * (
        served.needs.num_parameters if served.needs else 0
    )
    products = _finite_positive(measured.products_per_second.get(_product_precision(served))) if measured else None
    if products is None or not operations:
        return Decision(None, _UNKNOWN)
    return Decision(
        products / operations,
        f"Measured products of {products / 1e9:,.0f} GFLOP/s over {operations / 1e9:.2f} billion operations a token: an upper bound.",
    )


def _product_precision(served: SpeedInputs) -> str:
    return "int8" if served.timing and served.timing.trial.int8_copy else served.precision
