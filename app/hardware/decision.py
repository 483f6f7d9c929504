"""A decision with its reason, and the words that every part of the plan is written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
RecipeKey = tuple[str, str, str]  # device kind, CPU architecture, precision: the key of weights/recipes.py
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A choice and why it was made, in a sentence for the operator."""

    value: T
    reason: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to serve a checkpoint, timed: seconds of steps of the whole model, worked out from layers of its shapes.

    `decode_seconds` is a step by sequences that decode together, hardly any context behind them; `prefill_seconds` a step by tokens of one
    prompt; `context_token_seconds` what each token of context that a decoding sequence attends to adds to a step, all layers together;
    `pair_seconds` what each pair of a prompt's token and one computed in a chunk before it adds (0: not measured).
    An encoder has only `encode_seconds`, a step by tokens of all its texts, and `pair_seconds`, of two tokens of one text.
    `read_bytes` are the weights that a decode step reads, `operations_per_token` its multiply-adds, times two, for a token.
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


@dataclass(frozen=True, slots=True)
class Measurements:
    """What calibration measured on this very machine, for one checkpoint's shapes; empty where it did not run.

    `products_per_second` is the best rate by precision (multiply and add count as two), at the most threads that may serve.
    `most_few_rows`: up to so many rows four-bit weights are quicker than eight-bit ones; None: not measured.
    `fallback`: why nothing here was taken for true and the plan decides from facts alone, as what follows "since"; empty where it was.
    """

    read_bytes_per_second: float | None = None
    products_per_second: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    most_few_rows: int | None = None
    seconds: float = 0.0
    fallback: str = ""


def gib(size: int) -> str:
    """Bytes for a sentence: `2.5 GiB`, and MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
