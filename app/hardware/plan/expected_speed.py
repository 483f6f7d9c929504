"""Expected speed before the first request.

Capacity comes from the step times, measured or estimated, and the ratios compare measured ones with the limits of the
machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from app.hardware.decision import Decided, Decision, Measurements, PlanPart, TrialTimes, format_bytes, format_count
from app.hardware.facts import Needs
from app.hardware.plan.trials import TYPICAL_CONTEXT, TrialTiming, format_rate
from app.hardware.step_times import TABLE_TEXT_TOKENS

_UNKNOWN = "Known when a model is given and the machine is measured."
_NOT_GENERATING = "This model does not generate: see capacity and roofline for its expected speed."
INT8_COPY_ROWS = 128  # steps of more rows use the 8-bit copy, if there is one


@dataclass(frozen=True)
class SpeedEstimate(PlanPart):
    """Expected speed.

    Capacity is by phase (`prefill`, `decode`, `encode`) and rows of a step; empty if it is not known. Ratios to the
    limit are by phase, with `decode_full` for the most rows and `encode_few` for the fewest tokens; empty if not
    measured. `speed_source` is measured, noisy, estimated or unknown: where the capacity comes from.
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
    """Return where capacity and predicted wait come from."""
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
    """Return the rate by measured tokens of a step, or rows of a program."""
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
    """Return the measured sizes up to `most`, and `most` itself if it is below the largest measured size.

    Nothing is extrapolated.
    """
    known = [size for size in table if size <= most]
    return sorted({*known, min(most, max(table))})


def _roofline(measured: Measurements | None, served: SpeedInputs) -> Decision[Mapping[str, float]]:
    """Return the ratio of the minimum time of a step to its measured time.

    The minimum is the longer of reading the weights and computing the products at the measured rates of this
    machine.
    """
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


_LabelledRatios = tuple[dict[str, float], dict[str, str]]  # ratios and descriptions of the steps, by phase


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
    """Return the minimum seconds of a step of `rows` rows on this machine."""
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
    """Return the precision of the products of a prompt."""
    return "int8" if served.timing and served.timing.trial.int8_copy else served.precision


def _finite_positive(number: float | None) -> float | None:
    return number if number is not None and 0 < number < math.inf else None
