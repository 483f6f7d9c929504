"""Reports of the worker thread: statistics of each step, and a snapshot of the engine's state after it.

All are frozen dataclasses of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.hardware.step_times import (
    StepTimes,
    StepTimeTable,
)

Phase = Literal["prefill", "decode", "encode"]
# The cause of a slow step: it took longer than similar steps, or delayed running streams beyond their decodes.
Cause = Literal[
    "prefill", "page_fault", "garbage_collection", "throttled", "compiled", "preempted", "descheduled", "unknown"
]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one engine step, for the metrics: counts and seconds, no tensors."""

    seconds: float
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_sequences: int = 0
    num_prefill_sequences: int = 0
    num_decode_sequences: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    model_seconds: float = 0.0  # the part of `seconds` spent in the model's forward pass
    context_tokens: int = 0  # tokens that the decoding sequences attend to, summed
    prefill_pairs: int = 0  # pairs of a prompt's token and a token computed before its chunk
    draft_tokens: int = 0  # draft tokens that speculation computed in this step, in addition to `decode_tokens`
    accepted_tokens: int = 0  # draft tokens that equal the tokens the model sampled
    encode_tokens: int = 0  # tokens of texts, or rows of an exported program's batch
    num_encode_sequences: int = 0
    encode_pairs: int = 0  # pairs of tokens of the same text: the sum of the squared text lengths
    recomputed_tokens: int = 0  # the part of `prefill_tokens` that is recomputed after a preemption
    throttle_correction: float = (
        1.0  # average time of such a step over `seconds`: not 1 if a CPU quota stops it at times
    )
    is_first: bool = False  # first step of its shape: repeated shapes replay a recording, made now or later

    @property
    def phase(self) -> Phase:
        """Phase of the step; any prefill makes it `prefill`, since prefill takes most of its time."""
        return "encode" if self.encode_tokens else "prefill" if self.prefill_tokens else "decode"

    @property
    def corrected_seconds(self) -> float:
        """Throttle-corrected seconds, to be compared with the step time table.

        Under a CPU quota, the time of a single step is off by whole quota periods.
        """
        return self.seconds * self.throttle_correction

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all phases, including accepted draft tokens."""
        return self.prefill_tokens + self.decode_tokens + self.encode_tokens

    def expected_seconds(self, steps: StepTimeTable) -> float:
        """Return the seconds that a step time table gives for such a step.

        A draft token counts as one more row of its sequence.
        """
        if self.encode_tokens:
            return steps.encode(self.encode_tokens, self.encode_pairs)
        rows = self.num_decode_sequences + self.draft_tokens
        behind = self.prefill_pairs // self.prefill_tokens if self.prefill_tokens else 0
        return steps.mixed(rows, self.prefill_tokens, self.context_tokens, behind)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The worker's state after a step, replaced as a whole, so that any thread reads one consistent value.

    `stepped_at` is the `time.monotonic()` at which it was made. `rows` are the decoding sequences, each as (tokens
    generated, most tokens still to come). `prompts` are the sequences in prefill, each as (tokens computed, tokens
    to compute). `queue` has the token counts of the sequences that wait for a slot. All are in order. Texts and
    program batches, which one step completes, all wait in `queue`: for each request what is still to be computed.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    stepped_at: float = 0.0
    rows: tuple[tuple[int, int], ...] = ()
    context_tokens: int = 0  # tokens that the rows attend to, summed
    prompts: tuple[tuple[int, int], ...] = ()
    queue: tuple[int, ...] = ()
    step_times: StepTimes | None = None  # step times; None while unknown

    @property
    def kv_usage_ratio(self) -> float:
        """Used KV memory over its capacity, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0
