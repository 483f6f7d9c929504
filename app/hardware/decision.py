"""Decisions with reasons, which all parts of the plan share, and the measurements of calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Self, TypeVar

T = TypeVar("T")
RecipeKey = tuple[str, str, str]  # device kind, CPU architecture, precision: the key of weights/forms.py
Dtype = Literal["float32", "bfloat16", "float16"]
ALL_KINDS = ("decoder", "encoder", "program")  # kinds of models


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """Chosen value, and the reason as a sentence for the operator."""

    value: T
    reason: str


class Decided(Generic[T]):
    """Field of a part of the plan: it is set to a `Decision`, and read as the value.

    `show_for`: kinds of models whose explanation (`armature probe --model`) shows the decision. `zero_is_unknown`: 0
    means not known without a model.
    """

    def __init__(
        self, show_for: tuple[str, ...] = (), unit: Literal["", "bytes"] = "", zero_is_unknown: bool = False
    ) -> None:
        self.show_for, self.unit, self.zero_is_unknown = show_for, unit, zero_is_unknown
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: object, owner: type) -> T:
        if part is None:  # dataclasses look for a default value
            raise AttributeError(self._name)
        value: T = vars(part)[self._name].value
        return value

    def __set__(self, part: object, decision: Decision[T]) -> None:
        vars(part)[self._name] = decision


@dataclass(frozen=True)
class PlanPart:
    """Decisions that belong together: a dataclass whose fields are all `Decided`."""

    @property
    def decisions(self) -> Mapping[str, Decision[Any]]:
        return vars(self)

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, for the same reasons."""
        others = {name: replace(self.decisions[name], value=value) for name, value in values.items()}
        return type(self)(**{**self.decisions, **others})


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """Measured step times of one configuration, in seconds of the whole model, extrapolated from some layers.

    `decode_seconds` is by sequences that decode together, with hardly any context, `prefill_seconds` by tokens of one
    prompt. `context_token_seconds` is the time that each token of context of a decoding sequence adds; `pair_seconds`
    the time of each pair of a prompt token in the chunk and a token computed before it (0: not measured). An encoder
    has only `encode_seconds`, by tokens of all texts of a step, and `pair_seconds`, for each pair of tokens of one
    text. `read_bytes` are the bytes of weights that a decode step reads. `operations_per_token` is two times the
    multiply-adds of one token. `spread` is the relative spread of the samples of one step (the middle one of all
    steps). `noise` is set if the samples varied too much, or were too few, a clause that follows "since"; the seconds
    are then the least of the samples.
    """

    precision: str
    threads: int
    decode_seconds: Mapping[int, float]
    prefill_seconds: Mapping[int, float]
    context_token_seconds: float = 0.0
    read_bytes: int = 0
    operations_per_token: float = 0.0
    int8_copy: bool = False
    pair_seconds: float = 0.0
    encode_seconds: Mapping[int, float] = field(default_factory=dict)
    spread: float = 0.0
    noise: str = ""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of calibration on this machine for one checkpoint's shapes; empty if it did not run.

    `products_per_second` is the best rate of matrix products by precision, where a multiply and an add are two
    operations. `most_few_rows` is the largest number of rows for which 4-bit weights are faster than 8-bit weights
    (None: not measured). `single_steps` has, by precision, the seconds of a decode step of one sequence if nothing else
    of that precision was timed. With `is_partial`, an idle server timed its own steps. `fallback` is set if the
    measurements were rejected: a clause that follows "since".
    """

    read_bytes_per_second: float | None = None
    products_per_second: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[TrialTimes, ...] = ()
    most_few_rows: int | None = None
    seconds: float = 0.0
    fallback: str = ""
    single_steps: Mapping[str, float] = field(default_factory=dict)
    is_partial: bool = False


def format_bytes(size: int) -> str:
    """Format bytes for a sentence: `2.5 GiB`, or MiB below one GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def format_count(number: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: `1 core`, `2 cores`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
