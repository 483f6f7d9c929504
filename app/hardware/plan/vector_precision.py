"""The decision about the precision of a model whose results are vectors, labels or arrays."""

from __future__ import annotations

from app.hardware.decision import Decision, Measurements
from app.hardware.plan.estimates import known_timing
from app.hardware.plan.precision import (
    AUTO_PRECISIONS,
    MIN_INT8_GAIN,
    MIN_PARAMETERS,
    PrecisionCandidates,
    fitting_precisions,
    reference_or_replacement,
    reference_precision,
)
from app.hardware.plan.trials import TrialTiming


def choose_vector_precision(
    candidates: PrecisionCandidates, measurements: Measurements | None, threads: int
) -> Decision[str]:
    """Choose a precision for `auto` for a model whose results are vectors, labels or arrays.

    It is the reference precision if that fits, or int8 if it was measured fast enough and the cosine of the model's
    vectors is within `quality_budget`. The cosine is measured when the weights are packed; one that costs too much is
    then replaced. Of labels and arrays the cost is not measured, so they stay exact.
    """
    reference = reference_precision(candidates)
    names = candidates.batch_invariant_only(
        [reference, *(name for name in AUTO_PRECISIONS[:1] if name in candidates.available)]
    )
    fitting = fitting_precisions(candidates, names)
    start = reference_or_replacement(candidates, reference, names, fitting)
    inputs = candidates.estimate_inputs(measurements)
    now, int8 = known_timing(inputs, start.value, threads), known_timing(inputs, "int8", threads)
    if start.value == "int8" or now is None or int8 is None:
        return start
    how = "measured" if now.source == int8.source == "measured" else "estimated"
    said = f"int8 was {how} {int8.speedup_over(now):.2f} times as fast"
    objection = (
        "it does not suit the other settings"
        if "int8" not in fitting
        else _objection(candidates, start.value, now, int8)
    )
    if objection:
        return Decision(start.value, f"{start.reason} {said}. It is not chosen by itself, since {objection}.")
    return Decision(
        "int8",
        f"{how.capitalize()} {int8.speedup_over(now):.2f} times as fast as {start.value}; {candidates.cost_phrase('int8')}. "
        "Vectors of an index that was made in another precision stay comparable as far as that; "
        f"precision={start.value} computes them exactly.",
    )


def _objection(candidates: PrecisionCandidates, start: str, now: TrialTiming, int8: TrialTiming) -> str:
    """Return why int8 is not chosen, as a clause that follows "since"; empty if it is."""
    needs = candidates.needs
    if needs is None or not needs.has_vectors or candidates.device is not None:
        return "what it costs is measured only for vectors on a processor: set precision=int8 after comparing results"
    if needs.num_parameters < MIN_PARAMETERS:
        return f"a model of {needs.num_parameters / 1e6:.0f}M parameters is fast in any precision"
    if not {now.source, int8.source} <= {"measured", "noisy"}:
        return "vectors should stay comparable with those in an index, and that speed was not measured"
    if int8.speedup_over(now) < MIN_INT8_GAIN:
        return f"that is under the {MIN_INT8_GAIN:g} that would justify its cost in quality"
    if not candidates.within_budget("int8"):
        budget = 100 * candidates.settings.quality_budget
        return f"{candidates.cost_phrase('int8')}, which is over the quality_budget of {budget:g}%"
    return "" if candidates.may_follow_speed(start) else "it does not suit the other settings"
