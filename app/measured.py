"""What the worker thread says of itself: each step in numbers, and after each how it stands. Frozen, of plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.hardware.step_seconds import StepSeconds
from app.hardware.tempo import Tempo

Phase = Literal["prefill", "decode", "encode"]
# Why a step took longer than such steps do, or kept streams waiting longer than their decodes would have.
Cause = Literal["prefill", "page_fault", "garbage_collection", "throttled", "compiled", "preempted", "descheduled", "unknown"]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step, for the metrics: counts and seconds, no tensors."""

    seconds: float
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_sequences: int = 0
    num_prefill_sequences: int = 0
    num_decode_sequences: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    model_seconds: float = 0.0  # of `seconds`, in the model's forward pass
    context_tokens: int = 0  # that the decoding sequences attend to, all together
    prefill_pairs: int = 0  # of a prompt's token with one that was computed before its chunk
    drafted_tokens: int = 0  # guessed by speculation and computed in this step, beside `decode_tokens`
    accepted_tokens: int = 0  # of them, those that the model would have picked too
    encode_tokens: int = 0  # of texts, or rows of an exported program's batch
    num_encode_sequences: int = 0
    encode_pairs: int = 0  # of a text's token with one of its own: the squares of the texts' lengths
    recomputed_tokens: int = 0  # of `prefill_tokens`, of sequences that had lost their place: computed once already
    stretch: float = 1.0  # what such a step takes on average over `seconds`: not 1 where a quota stops it at times
    is_first: bool = False  # of its shape: what comes again and again is run again natively, and was recorded now or is not yet

    @property
    def phase(self) -> Phase:
        """A step with any prefill in it counts as prefill: that is what its time goes to."""
        return "encode" if self.encode_tokens else "prefill" if self.prefill_tokens else "decode"

    @property
    def usual_seconds(self) -> float:
        """What is held against a table of steps: under a quota that binds, a single step's own are off by whole periods."""
        return self.seconds * self.stretch

    @property
    def num_tokens(self) -> int:
        """Of all kinds, with the guesses that were right."""
        return self.prefill_tokens + self.decode_tokens + self.encode_tokens

    def expected_seconds(self, steps: StepSeconds) -> float:
        """What a table says of such a step: a guessed token is one more row of its sequence."""
        if self.encode_tokens:
            return steps.encode(self.encode_tokens, self.encode_pairs)
        rows = self.num_decode_sequences + self.drafted_tokens
        behind = self.prefill_pairs // self.prefill_tokens if self.prefill_tokens else 0
        return steps.mixed(rows, self.prefill_tokens, self.context_tokens, behind)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The worker's last word about itself, replaced whole after each step; readers on any thread see one consistent value.

    `stepped_at` is `time.monotonic()` when it was made. `rows` are the decoding sequences, each as tokens made and the most to come;
    `prompts` those being read, each as tokens computed and to compute; `queue` the tokens of those that have no place yet; all in order.
    Of texts and of programs, which are done in a step, all wait in `queue`: of each request what is still to be computed.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    stepped_at: float = 0.0
    rows: tuple[tuple[int, int], ...] = ()
    context_tokens: int = 0  # that the rows attend to, all together
    prompts: tuple[tuple[int, int], ...] = ()
    queue: tuple[int, ...] = ()
    tempo: Tempo | None = None  # what steps take; None while that is unknown

    @property
    def kv_usage_ratio(self) -> float:
        """Used KV memory over its capacity, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0
