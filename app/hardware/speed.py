"""What speed to expect before the first request: from the trial that was chosen, and how near it comes to this machine's ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.hardware.decision import Decision, Measurements
from app.hardware.facts import Needs

_UNKNOWN = "Known when a model is given and the machine is measured."


@dataclass(frozen=True, slots=True)
class Speed:
    """Capacity by phase (`prefill`, `decode`) and rows of a step; ratios of what is measured to the ceiling, by phase."""

    decode_tokens_per_second: Decision[float | None]
    prefill_tokens_per_second: Decision[float | None]
    capacity_tokens_per_second: Decision[Mapping[str, Mapping[int, float]]]
    roofline_ratio: Decision[Mapping[str, float]]


def expect(measurements: Measurements | None, needs: Needs | None, precision: str, weight_bytes: int) -> Speed:
    return Speed(
        decode_tokens_per_second=_decode_ceiling(measurements, weight_bytes),
        prefill_tokens_per_second=_prefill_ceiling(measurements, needs, precision),
        capacity_tokens_per_second=Decision({}, _UNKNOWN),
        roofline_ratio=Decision({}, _UNKNOWN),
    )


def _decode_ceiling(measurements: Measurements | None, weight_bytes: int) -> Decision[float | None]:
    """One sequence alone reads every weight once a token."""
    if measurements is None or measurements.read_bytes_per_second is None or not weight_bytes:
        return Decision(None, _UNKNOWN)
    rate = measurements.read_bytes_per_second
    return Decision(
        rate / weight_bytes, f"Measured reads of {rate / 1e9:.0f} GB/s over the weights' bytes: a ceiling for one sequence."
    )


def _prefill_ceiling(measurements: Measurements | None, needs: Needs | None, precision: str) -> Decision[float | None]:
    """A token costs a multiply and an add for each parameter."""
    rate = measurements.products_per_second.get(precision) if measurements else None
    if rate is None or needs is None or not needs.num_parameters:
        return Decision(None, _UNKNOWN)
    return Decision(
        rate / (2 * needs.num_parameters), f"Measured products of {rate / 1e9:.0f} GFLOP/s over two a parameter: a ceiling."
    )
