"""Valid measurements of calibration, compared at the row counts that matter for the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from app.hardware.decision import Measurements, TrialTimes
from app.hardware.step_times import StepTimeTable

FEW_SEQS, SEVERAL_SEQS = 1, 8  # sequences that decode together, typical for services on a CPU
TYPICAL_CONTEXT = 512  # tokens of context of a sequence, for stated speeds
PROMPT_TOKENS = 512  # tokens of a prompt, or of texts, with which two configurations are compared
FEW_TOKENS = 16  # tokens of one short text


TimingSource = Literal["measured", "noisy", "one step", "estimated"]


@dataclass(frozen=True, slots=True)
class TrialTiming:
    """Valid trial with its table of step times.

    `source` says if it was measured, measured with samples that varied too much, estimated, or estimated and scaled to one
    measured decode step of one sequence.
    """

    trial: TrialTimes
    steps: StepTimeTable
    source: TimingSource = "measured"

    def decode_rate(self, rows: int) -> float:
        """Return tokens a second of `rows` sequences that decode together, with hardly any context."""
        return rows / self.steps.decode(rows)

    def prefill_rate(self, tokens: int) -> float:
        """Return tokens a second of a prompt in steps of `tokens` tokens."""
        return tokens / self.steps.prefill(tokens)

    def encode_rate(self, tokens: int) -> float:
        """Return tokens a second of texts in steps of `tokens` tokens."""
        return tokens / self.steps.encode(tokens)

    def speedup_over(self, other: TrialTiming) -> float:
        """Return the overall speedup over `other`.

        It is the geometric mean over one sequence, several sequences and a prompt, or over few and many tokens of
        texts.
        """
        tokens = self.compared_tokens(other)
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, *(self._table.keys() & other._table.keys()), tokens)
            gains = [self.encode_rate(size) / other.encode_rate(size) for size in (few, tokens)]
        else:
            gains = [self.decode_rate(rows) / other.decode_rate(rows) for rows in (FEW_SEQS, SEVERAL_SEQS)]
            gains.append(self.prefill_rate(tokens) / other.prefill_rate(tokens))
        return float(math.prod(gains) ** (1 / len(gains)))

    def compared_tokens(self, other: TrialTiming, most: int = PROMPT_TOKENS) -> int:
        """Return the step size at which prompts or texts are compared: the largest with which both were timed."""
        both = self._table.keys() & other._table.keys()
        return max((size for size in both if size <= most), default=most)

    def describe_rates(self, tokens: int) -> str:
        """Return the rates as part of a sentence."""
        if self.trial.encode_seconds:
            few = min(FEW_TOKENS, tokens, *self.trial.encode_seconds)
            return (
                f"{format_rate(self.encode_rate(few))} a second in steps of {few} and "
                f"{format_rate(self.encode_rate(tokens))} of {tokens}"
            )
        return (
            f"{format_rate(self.decode_rate(FEW_SEQS))} tokens/s at one sequence, "
            f"{format_rate(self.decode_rate(SEVERAL_SEQS))} at {SEVERAL_SEQS} "
            f"and {format_rate(self.prefill_rate(tokens))} of a prompt"
        )

    @property
    def num_sizes(self) -> int:
        """Number of step sizes that were timed."""
        return len(self.trial.decode_seconds) + len(self._table)

    @property
    def _table(self) -> Mapping[int, float]:
        return self.trial.encode_seconds or self.trial.prefill_seconds


@dataclass(frozen=True, slots=True)
class TrialTimings:
    """Valid timings; none if nothing was measured, or if the measurements were rejected.

    Those whose samples varied too much are in `noisy`: they serve as better estimates and decide nothing else.
    """

    known: tuple[TrialTiming, ...] = ()
    noisy: tuple[TrialTiming, ...] = ()

    @classmethod
    def from_measurements(cls, measurements: Measurements | None) -> TrialTimings:
        """Return the valid timings among the measurements."""
        if measurements is None or measurements.fallback:
            return cls()
        valid = [trial for trial in measurements.trials if _is_valid(trial)]
        return cls(
            tuple(TrialTiming(trial, StepTimeTable.from_trial(trial)) for trial in valid if not trial.noise),
            tuple(TrialTiming(trial, StepTimeTable.from_trial(trial), "noisy") for trial in valid if trial.noise),
        )

    def find(self, precision: str, threads: int, *, int8_copy: bool = False) -> TrialTiming | None:
        """Return the timing of a configuration with the most step sizes, or None."""
        wanted = (precision, threads, int8_copy)
        found = [one for one in self.known if (one.trial.precision, one.trial.threads, one.trial.int8_copy) == wanted]
        return max(found, key=lambda one: one.num_sizes, default=None)

    def find_noisy(self, precision: str, threads: int) -> TrialTiming | None:
        """Return the noisy timing of a configuration without int8 copy with the most step sizes, or None."""
        return TrialTimings(self.noisy).find(precision, threads)

    def find_served(self, precision: str, threads: int, *, int8_copy: bool) -> TrialTiming | None:
        """Return the timing of a configuration; if the int8 copy was not timed, the timing without it."""
        return self.find(precision, threads, int8_copy=int8_copy) or self.find(precision, threads)

    def fewer_threads(self, precision: str, threads: int) -> list[TrialTiming]:
        """Return the timings without int8 copy that have fewer threads."""
        without_copy = [one for one in self.known if one.trial.precision == precision and not one.trial.int8_copy]
        return [one for one in without_copy if one.trial.threads < threads]


NO_TRIALS = TrialTimings()  # nothing was measured


def describe_sources(compared: Mapping[str, TrialTiming]) -> str:
    """Return sentences that say which precisions were not timed, not well or not beyond one step; empty if all were.

    They begin with a space.
    """
    estimated = [name for name, timing in compared.items() if timing.source == "estimated"]
    noisy = [name for name, timing in compared.items() if timing.source == "noisy"]
    single = [name for name, timing in compared.items() if timing.source == "one step"]
    verb = "was" if len(estimated) == 1 else "were"
    return f" {' and '.join(estimated)} {verb} not timed but estimated from bytes and operations." * bool(estimated) + (
        f" Of {' and '.join(single)} only one step was timed." * bool(single)
        + f" The times of {' and '.join(noisy)} are the least of samples that varied too much." * bool(noisy)
    )


def format_rate(number: float) -> str:
    """Format tokens a second for a sentence, with at least three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _is_valid(trial: TrialTimes) -> bool:
    """Return true if every number is plausible, and both phases, or the encoder's only one, were measured."""
    tables: Iterable[Mapping[int, float]] = (trial.decode_seconds, trial.prefill_seconds)
    if trial.encode_seconds:
        tables = (trial.encode_seconds,)
    extra = (trial.context_token_seconds, trial.pair_seconds, trial.operations_per_token, float(trial.read_bytes))
    return (
        trial.threads >= 1
        and all(
            table and all(rows > 0 and _is_plausible_seconds(seconds) for rows, seconds in table.items())
            for table in tables
        )
        and all(math.isfinite(number) and number >= 0 for number in extra)
    )


def _is_plausible_seconds(seconds: float) -> bool:
    return 1e-9 < seconds < 1e6
