"""Decision to keep an 8-bit copy of 4-bit layers, and the number of rows from which the copy is used.

Prompts and large batches use the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, Measurements, gib
from app.hardware.trials import Timing, rate
from app.settings import Settings

MIN_GAIN = 1.1  # least ratio of prompt rates that justifies one more byte for each weight
ROOM_SHARE = 4  # a copy may take at most 1/4 of the available memory


@dataclass(frozen=True, slots=True)
class Copy:
    """Cost and gain of a copy for prompts in steps of `tokens`.

    `without_copy` are the step times without the copy and `with_copy` those with it; None: not measured.
    """

    nbytes: int
    has_room: bool
    tokens: int
    lean: Timing | None = None
    fast: Timing | None = None


def on_device(settings: Settings, kind: str) -> Decision[bool]:
    """Decide against a copy on a GPU, which dequantizes 4-bit weights for products with many rows.

    Raises:
        PlanImpossible: int8_copy is on.
    """
    if settings.int8_copy == "on":
        raise PlanImpossible(f"int8_copy is on, but on {kind} 4-bit weights have no 8-bit copy: leave it at auto.")
    return Decision(False, "Only processors use an int8 copy.")


def decide(settings: Settings, chosen: str, wanted: Copy) -> Decision[bool]:
    """Decide if layers also have an 8-bit copy.

    Raises:
        PlanImpossible: int8_copy is on, but the precision is not int4.
    """
    if chosen != "int4":
        if settings.int8_copy == "on":
            raise PlanImpossible(
                f"int8_copy is on, but precision is {chosen}, and only int4 weights have a copy: set precision to int4."
            )
        return Decision(False, "Only int4 weights have an int8 copy.")
    more = f"{gib(wanted.nbytes)} more" if wanted.nbytes else "one more byte for each weight"
    if settings.int8_copy == "on":
        return Decision(True, f"Asked for: prompts and large batches use 8-bit weights, for {more} of memory.")
    if settings.int8_copy == "off":
        return Decision(False, "Asked for.")
    if settings.deterministic == "on":
        return Decision(False, "Deterministic is on, and the weights used for a row would depend on what else is in the batch.")
    return _copy_that_pays(wanted, more)


def _copy_that_pays(wanted: Copy, more: str) -> Decision[bool]:
    lean = "The 4-bit weights serve every number of rows."
    if wanted.lean is None or wanted.fast is None:
        return Decision(False, f"{lean} An 8-bit copy would take {more} and make prompts faster.")
    tokens = wanted.fast.prompt_tokens(wanted.lean, wanted.tokens)
    ours, theirs = wanted.lean.prefill_rate(tokens), wanted.fast.prefill_rate(tokens)
    gain = f"prompts measured {rate(theirs)} tokens/s with 8 bits, {rate(ours)} with 4 bits ({theirs / ours:.2f} times as fast)"
    if theirs < MIN_GAIN * ours:
        return Decision(False, f"{lean} A copy would gain too little: {gain}.")
    if not wanted.has_room:
        return Decision(
            False,
            f"{lean} A copy would take {more}: over a quarter of the available memory, or memory that keys and values need. But {gain}.",
        )
    return Decision(True, f"For {more} of memory {gain}.")


def most_few_rows(measurements: Measurements | None, copy: bool) -> Decision[int | None]:
    """Decide up to how many rows the 4-bit weights are used if there is an 8-bit copy."""
    if not copy:
        return Decision(None, "There is no 8-bit copy.")
    if measurements is None or measurements.most_few_rows is None:
        return Decision(None, "Not measured: the value of the recipe is used.")
    return Decision(measurements.most_few_rows, "Measured: with more rows, products with 8-bit weights are faster.")
