"""Times steps of the serving engine while there are no requests, if the start could not measure.

The engine computes requests of our own, whose events nobody gets. Before each step it is asked if a client's request
has arrived; then ours are ended at once, so a client waits for one short step at most. Finished sequences stay in the
prefix cache like any other and are the first to give way.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from app.engine.program import max_step_rows, synthetic_inputs, to_array
from app.engine.worker import Engine
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.messages import Abort, Encode, Generate, Infer, SamplingParams, Text
from app.metrics.steps import StepStats
from app.weights.program import ProgramCheckpoint
from armature_kernels.timing import MAX_SPREAD, MIN_SAMPLES, monotone_table, relative_spread

ROWS = (1, 8)  # sequences that decode together
PROMPT_TOKENS = (32, 128, 512)
TEXTS = (1, 4)  # of 128 tokens
TEXT_TOKENS = 128
PROGRAM_ROWS = (1, 4, 16)  # rows of an exported program's inputs
MAX_STEP_SECONDS = 0.5  # a longer step would delay a client's request: it is not timed
SAMPLES = 4  # of each size
FIRST_STEPS = 4  # at most so many steps of a size prepare its recording and are no samples
_LEAD_TOKENS = 4  # tokens of the prompts of sequences whose decodes are timed
_PREFIX = "idle"


@dataclass(frozen=True, slots=True)
class IdleSubject:
    """What to time.

    `expected` are the estimated times of the served configuration, `outputs` are an encoder's. `program` is set for an
    exported program, which has no vocabulary.
    """

    plan: ServingPlan
    expected: TrialTimes
    vocab_size: int = 0
    outputs: tuple[str, ...] = ()
    program: ProgramCheckpoint | None = None


class Interrupted(Exception):
    """A command waits for the worker."""


class IdleMeasurement:
    def __init__(self, subject: IdleSubject, engine: Engine, is_wanted: Callable[[], bool]) -> None:
        self._subject, self._engine, self._is_wanted = subject, engine, is_wanted
        self._random = random.Random(0)
        self._number = 0

    def run(self) -> TrialTimes | None:
        """Return the measured times; None if a command arrived, or if the samples differ too much."""
        expected = self._subject.expected
        try:
            if expected.encode_seconds:
                program = self._subject.program
                encode = self._table(
                    (self._text_samples(texts) for texts in TEXTS)
                    if program is None
                    else (self._row_samples(program, rows) for rows in PROGRAM_ROWS)
                )
                return None if encode is None else replace(expected, encode_seconds=encode)
            decode = self._table(self._decode_samples(rows) for rows in ROWS)
            prefill = self._table(self._prompt_samples(tokens) for tokens in PROMPT_TOKENS)
            return replace(expected, decode_seconds=decode, prefill_seconds=prefill) if decode and prefill else None
        except Interrupted:
            return None
        finally:
            for number in range(1, self._number + 1):
                self._engine.abort(Abort(f"{_PREFIX}-{number}"))

    def _table(self, samples: Iterator[tuple[int, Sequence[float]]]) -> dict[int, float] | None:
        """Return the median seconds by size, up to the first size that is too long; None if they are not usable."""
        seconds: dict[int, float] = {}
        for size, found in samples:
            if len(found) < MIN_SAMPLES:
                break
            if relative_spread(found) > MAX_SPREAD:
                return None
            seconds[size] = statistics.median(found)
            if seconds[size] > MAX_STEP_SECONDS / 4:  # the next size takes up to four times as long
                break
        return monotone_table(seconds) if seconds else None

    # ---- requests of our own ---------------------------------------------------------------------------------------

    def _decode_samples(self, rows: int) -> tuple[int, list[float]]:
        rows = min(rows, self._subject.plan.memory.max_running_seqs)
        for _ in range(rows):
            self._generate(_LEAD_TOKENS, 1 + FIRST_STEPS + SAMPLES)
        steps = self._steps()
        return rows, [
            step.corrected_seconds
            for step in steps
            if step.kind == "decode"
            and step.num_decode_sequences == rows
            and not step.draft_tokens
            and not step.is_first
        ]

    def _prompt_samples(self, tokens: int) -> tuple[int, list[float]]:
        plan = self._subject.plan
        tokens = min(tokens, plan.memory.max_batch_tokens, plan.memory.max_model_len - 2)
        return tokens, self._samples(
            lambda: self._generate(tokens, 1), lambda step: step.prefill_tokens == tokens and not step.is_first
        )

    def _text_samples(self, texts: int) -> tuple[int, list[float]]:
        plan = self._subject.plan
        each = min(TEXT_TOKENS, plan.memory.max_model_len)
        texts = max(1, min(texts, plan.memory.batch_target_tokens // each))
        outputs = self._subject.outputs[:1]

        def add() -> None:
            made = tuple(Text(self._token_ids(each)) for _ in range(texts))
            self._engine.add(Encode(self._next_id(), made, outputs, arrived_at=0.0))

        size = texts * each
        return size, self._samples(add, lambda step: step.encode_tokens == size and not step.is_first)

    def _row_samples(self, program: ProgramCheckpoint, rows: int) -> tuple[int, list[float]]:
        most = max_step_rows(program, self._subject.plan.memory.batch_target_tokens)
        rows = max(program.min_rows, min(rows, most))
        inputs = synthetic_inputs(program.signature, rows)
        arrays = {spec.name: to_array(inputs[spec.name], spec.datatype) for spec in program.signature.inputs}
        outputs = tuple(spec.name for spec in program.signature.outputs)
        return rows, self._samples(
            lambda: self._engine.add(Infer(self._next_id(), arrays, outputs, arrived_at=0.0)),
            lambda step: step.encode_tokens == rows,
        )

    def _samples(self, add: Callable[[], object], is_sample: Callable[[StepStats], bool]) -> list[float]:
        """Return the seconds of `SAMPLES` steps, or fewer if the first requests give none. `add` adds one request."""
        found: list[float] = []
        for _ in range(FIRST_STEPS + SAMPLES):
            if len(found) == SAMPLES:
                break
            add()
            found += [step.corrected_seconds for step in self._steps() if is_sample(step)]
        return found

    def _generate(self, tokens: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self._number + 1)
        self._engine.add(Generate(self._next_id(), self._token_ids(tokens), params, arrived_at=0.0))

    def _next_id(self) -> str:
        self._number += 1
        return f"{_PREFIX}-{self._number}"

    def _token_ids(self, number: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._subject.vocab_size) for _ in range(number))

    def _steps(self) -> list[StepStats]:
        """Compute all our requests, and return the steps' statistics. Raises `Interrupted`."""
        found = []
        while self._engine.has_work:
            if self._is_wanted():
                raise Interrupted
            self._engine.step()
            if self._engine.stats is not None:
                found.append(self._engine.stats)
        return found
