"""How closely a way to serve is timed: which steps of it, and how much of the model is made up for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from app.hardware.decision import Trial

COARSE_LAYERS, FULL_LAYERS = 8, 4  # one in so many is made
COARSE_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step through `layers` layers: `decode` of so many sequences, `prefill` of so many tokens of a prompt, `context` behind each; or
    `encode` of so many tokens of texts, of `context` tokens each (0: as in the table)."""

    kind: str
    size: int
    layers: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a model is made up.

    `cache_bytes`: of the machine's largest cache, which the weights of a step must exceed as those of the whole model do. At least one
    layer in `layers_share`: the less is made of each that is measured. `most_outputs`: of the output layer, whose rest counts as layers.
    """

    cache_bytes: int
    layers_share: int
    most_outputs: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """At which rows of decodes, tokens of a prompt and of texts (none: at all that matter), and with how much of the model made up."""

    layers_share: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()
    most_outputs: int | None = None
    context: bool = False


FULL = Look(FULL_LAYERS, context=True)
COARSE = Look(COARSE_LAYERS, rows=(1, 8), tokens=(128,), texts=(16, 256), most_outputs=COARSE_OUTPUTS)


class Rehearsed(Protocol):
    """A way to serve that can be timed step by step."""

    def shapes(self, look: Look) -> list[StepShape]:
        """The quickest first: for the last there may be no time."""
        ...

    def step(self, shape: StepShape) -> Callable[[], object]:
        """What runs that step, any number of times."""
        ...

    def trial(self, threads: int, seconds: Mapping[StepShape, float]) -> Trial | None:
        """What is said of the whole model; None where too little of it was measured, or nonsense."""
        ...


def doubling(first: int, most: int) -> list[int]:
    """first, 2 · first, … and `most` itself."""
    return [*_powers(first, most), most]


def _powers(first: int, most: int) -> Iterator[int]:
    while first < most:
        yield first
        first *= 2
