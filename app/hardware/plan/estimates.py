"""Estimated step times of a configuration that was not timed.

A step reads every weight once and multiplies each row with all of them. Its time follows from the bytes, the operations
and the machine's two ceilings: measured ones if there are any, else conservative figures by instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Facts, Needs
from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.hardware.plan.trials import FEW_SEQS, TimingSource, TrialTiming, TrialTimings
from app.hardware.probe.software import TORCH_KERNELS
from app.hardware.step_times import StepTimeTable
from armature_kernels.linear.torchao_config import KLEIDI_INT4

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


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """What an estimate depends on.

    `level` is the level of the native kernels, or the name of the kernels used instead. `device` is the kind of device.
    """

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

    If other precisions were measured slower or faster than their estimates, this one is expected to be so too: an
    estimate must neither win because the machine was busy while the others were measured, nor lose because it was busy
    while the ceilings were. Noisy timings and single steps that all took several times as long as estimated say only that
    other work used the cores: they are ignored. None: nothing is known, because the model,
    its bytes in this precision or the machine's products are not.
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
    """Return the least factor of an estimate with which a step reads its weights no faster than the machine has shown.

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

    def table(sizes: tuple[int, ...], output: float = 0.0) -> dict[int, float]:
        each = (operations + output) / ceilings.products_per_second
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


def find_ceilings(inputs: EstimateInputs, precision: str, threads: int) -> Ceilings | None:
    """Return the ceilings for a precision; None if they are not known, or if nothing here multiplies it well.

    Measured ones are used even if the steps themselves varied too much, since they are the best of many samples. A
    read rate that was not measured is at least what measured steps have shown.
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
    """Return precisions in the order of their expected speed, the fastest first; those that are not known come last.

    The speed is the mean (geometric) over one sequence and eight, or over few and many tokens of texts.
    """
    known = {name: known_timing(inputs, name, threads) for name in names}
    fastest = next((timing for timing in known.values() if timing is not None), None)

    def slowness(name: str) -> float:
        timing = known[name]
        return math.inf if timing is None or fastest is None else fastest.speedup_over(timing)

    return sorted(known, key=slowness)
