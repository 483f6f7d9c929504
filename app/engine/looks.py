"""Defines the steps that a trial times, and the part of the model that it builds for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from app.hardware.decision import Trial

COARSE_LAYERS, FULL_LAYERS = 8, 4  # one layer in this many is built
COARSE_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step through `layers` layers of the model.

    Kind `decode`: `size` sequences. Kind `prefill`: `size` tokens of a prompt. Both have `context` earlier tokens
    in each sequence. Kind `encode`: `size` tokens of texts that have `context` tokens each (0: as in the table).
    """

    kind: str
    size: int
    layers: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of a model that is built with synthetic weights.

    - `cache_bytes`: size of the machine's largest cache, which the weights of a step must exceed as those of the
      whole model do.
    - `layers_share`: at least one layer in this many is built. A larger share means fewer layers.
    - `most_outputs`: limit for the output layer; the rest of it is counted as layers.
    """

    cache_bytes: int
    layers_share: int
    most_outputs: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """The steps of a trial: rows of decodes, tokens of a prompt and tokens of texts (empty: all that matter).

    `layers_share` and `most_outputs` limit the part of the model that is built. `context` adds steps with context.
    """

    layers_share: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()
    most_outputs: int | None = None
    context: bool = False


FULL = Look(FULL_LAYERS, context=True)
COARSE = Look(COARSE_LAYERS, rows=(1, 8), tokens=(128,), texts=(16, 256), most_outputs=COARSE_OUTPUTS)


class Rehearsed(Protocol):
    """A model under one plan that can be timed step by step."""

    def shapes(self, look: Look) -> list[StepShape]:
        """Return the steps to time, the fastest first, since time may run out."""
        ...

    def step(self, shape: StepShape) -> Callable[[], object]:
        """Return a function that runs that step; it may be called any number of times."""
        ...

    def trial(self, threads: int, seconds: Mapping[StepShape, float]) -> Trial | None:
        """Return the result for the whole model, or None if steps are missing or their times are inconsistent."""
        ...


def doubling(first: int, most: int) -> list[int]:
    """Return first, 2 · first, 4 · first, … and finally `most` itself."""
    return [*_powers(first, most), most]


def _powers(first: int, most: int) -> Iterator[int]:
    while first < most:
        yield first
        first *= 2
