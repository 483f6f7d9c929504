"""A decision with its reason, and the words that every part of the plan is written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
RecipeKey = tuple[str, str, str]  # device kind, CPU architecture, precision: the key of weights/recipes.py
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A choice and why it was made, in a sentence for the operator."""

    value: T
    reason: str


@dataclass(frozen=True, slots=True)
class Measurements:
    """What calibration measured on this very machine; empty where it did not run.

    `products_per_second` is the best rate by precision (multiply and add count as two); `step_seconds` is a decode step by rows.
    """

    read_bytes_per_second: float | None = None
    products_per_second: Mapping[str, float] = field(default_factory=dict)
    step_seconds: Mapping[int, float] = field(default_factory=dict)


def gib(size: int) -> str:
    """Bytes for a sentence: `2.5 GiB`, and MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
