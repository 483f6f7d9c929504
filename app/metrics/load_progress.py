"""How far the loading of a model has come, for the console, `/readyz` and `/info`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MIN_SECONDS = 1.0  # of a phase, before its remaining time is estimated


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One moment of a phase of loading: weight bytes and linear layers that are done, and seconds since it began."""

    phase: str
    done_bytes: int
    total_bytes: int
    done_layers: int = 0
    num_layers: int = 0
    elapsed_seconds: float = 0.0

    @property
    def percent(self) -> int:
        """Share of the bytes that are done, 0 to 100, rounded down."""
        return 100 * self.done_bytes // max(1, self.total_bytes)

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate of the seconds until the phase ends, if bytes go on as fast; None while it is unknown."""
        if not self.done_bytes or self.elapsed_seconds < _MIN_SECONDS:
            return None
        return self.elapsed_seconds * (self.total_bytes - self.done_bytes) / self.done_bytes

    def to_json(self) -> dict[str, Any]:
        remaining = self.remaining_seconds
        return {
            "phase": self.phase,
            "layers_done": self.done_layers,
            "layers_total": self.num_layers,
            "percent": self.percent,
            "remaining_seconds": None if remaining is None else round(remaining, 1),
        }

    def __str__(self) -> str:
        return f"{self.phase}, {self.percent}%"

    @property
    def description(self) -> str:
        remaining = self.remaining_seconds
        layers = f", {self.done_layers} of {self.num_layers} linear layers" if self.num_layers else ""
        return f"{self}{layers}{'' if remaining is None else f', about {remaining:.0f} s left'}"
