"""How steps are made: run again natively from a recording, some tokens guessed, prompts in parts; and whether to measure first."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, Measurements
from app.hardware.facts import Needs
from app.hardware.native_library import TWINS
from app.hardware.tempo import MIXED_TO_DECODE_RATIO, SHORTEST_TARGET_SECONDS
from app.hardware.trials import SEVERAL, TYPICAL_CONTEXT, Timing
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Stepping:
    itl_target_seconds: Decision[float | None]
    compile: Decision[bool]
    calibrate: Decision[bool]
    speculation: Decision[bool]


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, on which kind of device, by which level of our kernels."""

    needs: Needs | None
    device: str
    level: str
    timing: Timing | None = None


def decide(settings: Settings, measurements: Measurements | None, served: Served) -> Stepping:
    return Stepping(
        itl_target_seconds=_itl_target(settings, served),
        compile=_recorded(settings, served),
        calibrate=_calibrate(settings, measurements, served),
        speculation=_speculation(settings, served),
    )


def _itl_target(settings: Settings, served: Served) -> Decision[float | None]:
    """A target in seconds would be missed by every step of many sequences, or chop prompts for few: it follows the steps as they are."""
    if settings.itl_target_ms != "auto":
        return Decision(settings.itl_target_ms / 1000, "Asked for.")
    if served.needs is not None and not served.needs.generates:
        return Decision(None, "This model generates nothing that a stream could wait for.")
    timing = served.timing
    rule = (
        f"With a part of a prompt a step may take {MIXED_TO_DECODE_RATIO:g} times one of decodes alone, as measured while serving"
    )
    least = f"and {SHORTEST_TARGET_SECONDS * 1000:.0f} ms in any case"
    if timing is None:
        return Decision(None, f"{rule}, {least}.")
    alone = timing.steps.decode(SEVERAL, SEVERAL * TYPICAL_CONTEXT)
    target = max(MIXED_TO_DECODE_RATIO * alone, SHORTEST_TARGET_SECONDS)
    return Decision(
        None, f"{rule}, {least}: about {target * 1000:.0f} ms beside {SEVERAL} sequences, whose steps take {alone * 1000:.1f}."
    )


def _recorded(settings: Settings, served: Served) -> Decision[bool]:
    """Nothing is compiled: a step's operations are recorded once and run again without Python, so readiness waits for nothing."""
    if settings.compile == "off":
        return Decision(False, "Asked for: every step goes through Python.")
    if served.needs is not None and served.needs.kind == "program":
        return _own_operations(settings)
    if served.device != "cpu":
        return _captured(settings, served)
    if served.level != TWINS:
        asked = "Asked for: a" if settings.compile == "on" else "A"
        return Decision(
            True, f"{asked} step's operations are recorded once and run again natively; no compiler is used, and no start waits."
        )
    if settings.compile == "on":
        raise PlanImpossible(
            "compile is on, but our native kernels do not serve here, and only their operations can be recorded and run again: "
            "leave it at auto."
        )
    return Decision(False, "Only operations of our native kernels are recorded, and they do not serve here.")


def _captured(settings: Settings, served: Served) -> Decision[bool]:
    """A device's queue records a step's work once; what is asked of it again takes one call in place of hundreds."""
    kind = served.device
    if kind == "cuda":
        asked = "Asked for: s" if settings.compile == "on" else "S"
        which = "that only decode" if served.needs is None or served.needs.generates else "of few short texts"
        return Decision(True, f"{asked}teps {which} are captured once for each size of batch, and replayed (CUDA graphs).")
    if settings.compile == "on":
        raise PlanImpossible(f"compile is on, but on {kind} nothing can be captured and replayed: leave it at auto.")
    return Decision(False, "On an Apple GPU nothing can be captured and replayed.")


def _own_operations(settings: Settings) -> Decision[bool]:
    if settings.compile == "on":
        raise PlanImpossible(
            "compile is on, but an exported program's operations are its own, and only ours are recorded: leave it at auto."
        )
    return Decision(False, "An exported program's operations are its own: only ours are recorded.")


def _calibrate(settings: Settings, measurements: Measurements | None, served: Served) -> Decision[bool]:
    if settings.calibrate == "off":
        return Decision(False, "Asked for: decided from facts alone.")
    if served.needs is not None and served.needs.rows_vary:
        return Decision(False, "What a row of this program costs depends on dimensions that each request chooses.")
    if measurements is None:
        return Decision(
            True, "This machine will be measured with this model's shapes before weights are read, or once for all starts."
        )
    if measurements.fallback:
        return Decision(True, f"Measured, but decided from facts alone, since {measurements.fallback}.")
    return Decision(True, f"Measured on this machine with this model's shapes, in {measurements.seconds:.1f} s.")


def _speculation(settings: Settings, served: Served) -> Decision[bool]:
    if settings.speculation == "off":
        return Decision(False, "Asked for.")
    if served.device != "cpu" or (served.needs is not None and not served.needs.generates):
        return Decision(False, "Only for models that generate, on processors.")
    return Decision(
        True, "What follows a repeated phrase is guessed and checked in one step; it stops by itself while it does not pay."
    )
