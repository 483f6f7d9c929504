"""What of calibration a plan may lean on: the trials that can be believed, compared at the row counts that matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.hardware.decision import Measurements, Trial
from app.hardware.step_seconds import StepSeconds

FEW, SEVERAL = 1, 8  # sequences that decode together: where services on a CPU live
TYPICAL_CONTEXT = 512  # tokens behind a sequence, where what it costs in service is told
PROMPT_TOKENS = 512  # of a prompt, or of texts, where two ways to serve are compared
FEW_TOKENS = 16  # of one short text


@dataclass(frozen=True, slots=True)
class Timing:
    """A believable trial with the steps worked out from it."""

    trial: Trial
    steps: StepSeconds

    def decode_rate(self, rows: int) -> float:
        """Tokens a second of sequences that decode together, hardly any context behind them."""
        return rows / self.steps.decode(rows)

    def prefill_rate(self, tokens: int) -> float:
        return tokens / self.steps.prefill(tokens)

    def encode_rate(self, tokens: int) -> float:
        """Tokens a second of texts, so many of them in a step."""
        return tokens / self.steps.encode(tokens)

    def gain_over(self, other: Timing) -> float:
        """So many times as quick, all in all: the geometric mean over one sequence, several, and a prompt, or over few texts and many."""
        tokens = self.prompt_tokens(other)
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, *(self._table.keys() & other._table.keys()), tokens)
            gains = [self.encode_rate(size) / other.encode_rate(size) for size in (few, tokens)]
        else:
            gains = [self.decode_rate(rows) / other.decode_rate(rows) for rows in (FEW, SEVERAL)]
            gains.append(self.prefill_rate(tokens) / other.prefill_rate(tokens))
        return float(math.prod(gains) ** (1 / len(gains)))

    def prompt_tokens(self, other: Timing, most: int = PROMPT_TOKENS) -> int:
        """In steps of how many tokens prompts, or texts, are compared: the most that both were timed with."""
        both = self._table.keys() & other._table.keys()
        return max((size for size in both if size <= most), default=most)

    def figures(self, tokens: int) -> str:
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, tokens, *self.trial.encode_seconds)
            return f"{rate(self.encode_rate(few))} a second in steps of {few} and {rate(self.encode_rate(tokens))} of {tokens}"
        return (
            f"{rate(self.decode_rate(FEW))} tokens/s at one sequence, {rate(self.decode_rate(SEVERAL))} at {SEVERAL} "
            f"and {rate(self.prefill_rate(tokens))} of a prompt"
        )

    @property
    def num_sizes(self) -> int:
        """At how many sizes of a step it was timed."""
        return len(self.trial.decode_seconds) + len(self._table)

    @property
    def _table(self) -> Mapping[int, float]:
        return self.trial.encode_seconds or self.trial.prefill_seconds


@dataclass(frozen=True, slots=True)
class Trials:
    """The timings that can be believed; none where nothing was measured, or nothing was taken for true."""

    known: tuple[Timing, ...] = ()

    @classmethod
    def of(cls, measurements: Measurements | None) -> Trials:
        if measurements is None or measurements.fallback:
            return cls()
        return cls(tuple(Timing(trial, StepSeconds.of(trial)) for trial in measurements.trials if _is_believable(trial)))

    def at(self, precision: str, threads: int, *, int8_copy: bool = False) -> Timing | None:
        """The one that was timed at the most sizes."""
        wanted = (precision, threads, int8_copy)
        found = [one for one in self.known if (one.trial.precision, one.trial.threads, one.trial.int8_copy) == wanted]
        return max(found, key=lambda one: one.num_sizes, default=None)

    def serving(self, precision: str, threads: int, *, int8_copy: bool) -> Timing | None:
        """As it will be; where a copy was not timed, as it would be without."""
        return self.at(precision, threads, int8_copy=int8_copy) or self.at(precision, threads)

    def fewer_threads(self, precision: str, threads: int) -> list[Timing]:
        lean = [one for one in self.known if one.trial.precision == precision and not one.trial.int8_copy]
        return [one for one in lean if one.trial.threads < threads]


NOTHING = Trials()  # nothing was measured


def rate(number: float) -> str:
    """Tokens a second for a sentence: three digits at the least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _is_believable(trial: Trial) -> bool:
    """Every number one that a clock could give; both phases measured, or the one that an encoder has."""
    tables: Iterable[Mapping[int, float]] = (trial.decode_seconds, trial.prefill_seconds)
    if trial.encode_seconds:
        tables = (trial.encode_seconds,)
    extra = (trial.context_token_seconds, trial.pair_seconds, trial.operations_per_token, float(trial.read_bytes))
    return (
        trial.threads >= 1
        and all(table and all(rows > 0 and _is_time(seconds) for rows, seconds in table.items()) for table in tables)
        and all(math.isfinite(number) and number >= 0 for number in extra)
    )


def _is_time(seconds: float) -> bool:
    return 1e-9 < seconds < 1e6
