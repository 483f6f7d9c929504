"""Whether layers are held in eight bits beside four, for prompts and large batches, and from how many rows on that copy multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, Measurements, gib
from app.hardware.trials import Timing, rate
from app.settings import Settings

MIN_GAIN = 1.1  # times as many tokens of a prompt a second: less is not worth a byte a weight
ROOM_SHARE = 4  # a copy may take one part in so many of what is available


@dataclass(frozen=True, slots=True)
class Copy:
    """What a copy would take and gain: prompts in steps of `tokens`, `lean` without it and `fast` with it (None: not measured)."""

    nbytes: int
    has_room: bool
    tokens: int
    lean: Timing | None = None
    fast: Timing | None = None


def on_device(settings: Settings, kind: str) -> Decision[bool]:
    """A device has none: it multiplies what four-bit weights mean where rows are many."""
    if settings.int8_copy == "on":
        raise PlanImpossible(f"int8_copy is on, but on {kind} four-bit weights are held alone: leave it at auto.")
    return Decision(False, "It belongs to processors.")


def decide(settings: Settings, chosen: str, wanted: Copy) -> Decision[bool]:
    """Whether layers are held in eight bits beside four."""
    if chosen != "int4":
        if settings.int8_copy == "on":
            raise PlanImpossible(
                f"int8_copy is on, but precision is {chosen}: the copy belongs to int4. Set precision to int4 too."
            )
        return Decision(False, "It belongs to int4.")
    more = f"{gib(wanted.nbytes)} more" if wanted.nbytes else "one byte a weight more"
    if settings.int8_copy == "on":
        return Decision(True, f"Asked for: prompts and large batches multiply eight-bit weights, for {more} of memory.")
    if settings.int8_copy == "off":
        return Decision(False, "Asked for.")
    if settings.deterministic == "on":
        return Decision(False, "Which copy multiplies would depend on what else is in the batch, and deterministic is on.")
    return _copy_that_pays(wanted, more)


def _copy_that_pays(wanted: Copy, more: str) -> Decision[bool]:
    lean = "Lean: one four-bit form for every number of rows."
    if wanted.lean is None or wanted.fast is None:
        return Decision(False, f"{lean} A copy in eight bits would take {more} and make prompts quicker.")
    tokens = wanted.fast.prompt_tokens(wanted.lean, wanted.tokens)
    ours, theirs = wanted.lean.prefill_rate(tokens), wanted.fast.prefill_rate(tokens)
    gain = (
        f"prompts measured {rate(theirs)} tokens/s with eight bits, {rate(ours)} with four ({theirs / ours:.2f} times as quick)"
    )
    if theirs < MIN_GAIN * ours:
        return Decision(False, f"{lean} A copy would gain too little: {gain}.")
    if not wanted.has_room:
        return Decision(
            False,
            f"{lean} A copy would take {more}, over a quarter of what memory is left or what keys and values need, though {gain}.",
        )
    return Decision(True, f"For {more} of memory {gain}.")


def most_few_rows(measurements: Measurements | None, copy: bool) -> Decision[int | None]:
    """Where a copy in eight bits lies beside four: up to how many rows the four-bit form multiplies."""
    if not copy:
        return Decision(None, "There is no copy in eight bits.")
    if measurements is None or measurements.most_few_rows is None:
        return Decision(None, "Not measured: as the recipe says.")
    return Decision(measurements.most_few_rows, "Measured: beyond that many rows products in eight bits are quicker.")
