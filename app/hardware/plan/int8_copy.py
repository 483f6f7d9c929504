"""Decisions about an 8-bit copy of 4-bit layers, which large steps use, and from how many rows on they use it."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, Measurements, format_bytes
from app.hardware.plan.precision import INT4_PRECISIONS, needs_batch_invariance
from app.hardware.plan.trials import TrialTiming, format_rate
from app.settings import Settings

MIN_COPY_GAIN = 1.1  # least ratio of prompt rates that justifies one more byte for each weight
MEMORY_DIVISOR = 4  # a copy may take at most 1/4 of the available memory


@dataclass(frozen=True, slots=True)
class Int8CopyGain:
    """Cost and gain of a copy for prompts in steps of `tokens`.

    `without_copy` are the step times without the copy and `with_copy` those with it; None: not measured.
    """

    nbytes: int
    has_room: bool
    tokens: int
    without_copy: TrialTiming | None = None
    with_copy: TrialTiming | None = None


def refuse_on_device(settings: Settings, kind: str) -> Decision[bool]:
    """Decide against a copy on a GPU, which dequantizes 4-bit weights for products with many rows.

    Raises:
        PlanImpossible: int8_copy is on.
    """
    if settings.int8_copy == "on":
        raise PlanImpossible(f"int8_copy is on, but on {kind} 4-bit weights have no 8-bit copy: leave it at auto.")
    return Decision(False, "Only processors use an int8 copy.")


def decide_int8_copy(settings: Settings, chosen: str, candidate: Int8CopyGain) -> Decision[bool]:
    """Decide if layers also have an 8-bit copy.

    Raises:
        PlanImpossible: int8_copy is on, but the precision is not int4.
    """
    if chosen not in INT4_PRECISIONS:
        if settings.int8_copy == "on":
            raise PlanImpossible(
                f"int8_copy is on, but precision is {chosen}, and only int4 weights have a copy: set precision to int4."
            )
        return Decision(False, "Only int4 weights have an int8 copy.")
    more = f"{format_bytes(candidate.nbytes)} more" if candidate.nbytes else "one more byte for each weight"
    if settings.int8_copy == "on":
        return Decision(True, f"Asked for: prompts and large batches use 8-bit weights, for {more} of memory.")
    if settings.int8_copy == "off":
        return Decision(False, "Asked for.")
    if needs_batch_invariance(settings):
        return Decision(
            False, "Deterministic is on, and the weights used for a row would depend on what else is in the batch."
        )
    return _measured_decision(candidate, more)


def _measured_decision(candidate: Int8CopyGain, more: str) -> Decision[bool]:
    intro = "The 4-bit weights serve every number of rows."
    if candidate.without_copy is None or candidate.with_copy is None:
        return Decision(
            False, f"{intro} An 8-bit copy would take {more}; whether it makes prompts faster was not measured."
        )
    tokens = candidate.with_copy.compared_tokens(candidate.without_copy, candidate.tokens)
    rate_without, rate_with = candidate.without_copy.prefill_rate(tokens), candidate.with_copy.prefill_rate(tokens)
    gain = (
        f"prompts measured {format_rate(rate_with)} tokens/s with 8 bits, {format_rate(rate_without)} "
        f"with 4 bits ({rate_with / rate_without:.2f} times as fast)"
    )
    if rate_with < MIN_COPY_GAIN * rate_without:
        return Decision(False, f"{intro} A copy would gain too little: {gain}.")
    if not candidate.has_room:
        return Decision(
            False,
            f"{intro} A copy would take {more}: over a quarter of the available memory, or memory that keys and values need. But {gain}.",
        )
    return Decision(True, f"For {more} of memory {gain}.")


def decide_most_few_rows(measurements: Measurements | None, copy: bool) -> Decision[int | None]:
    """Decide up to how many rows the 4-bit weights are used if there is an 8-bit copy."""
    if not copy:
        return Decision(None, "There is no 8-bit copy.")
    if measurements is None or measurements.most_few_rows is None:
        return Decision(None, "Not measured: the value of the recipe is used.")
    return Decision(measurements.most_few_rows, "Measured: with more rows, products with 8-bit weights are faster.")
