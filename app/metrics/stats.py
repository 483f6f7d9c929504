"""Reports of the worker thread: statistics of each step, a snapshot of the engine's state after it, and a step log."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from app.hardware.step_times import StepTimes, StepTimeTable

Phase = Literal["prefill", "decode", "encode"]
# The phase, and `mixed` for prefill next to streams that need their next token. Steps of one kind have similar costs.
StepKind = Literal["prefill", "decode", "encode", "mixed"]
# The cause of a slow step: it took longer than similar steps, or delayed running streams beyond their decodes.
Cause = Literal[
    "prefill", "page_fault", "garbage_collection", "throttled", "compiled", "preempted", "descheduled", "unknown",
    "thermal", "frequency",
]  # fmt: skip

CAPACITY_STEPS = 65_536  # a minute of a small encoder's steps, an hour of a large decoder's
MAX_STEPS = 2048  # steps in one response: as JSON a few milliseconds of the event loop

_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_CAUSES: Final[tuple[Cause | None, ...]] = (None, *get_args(Cause))
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_CAUSE_NUMBERS = {cause: number for number, cause in enumerate(_CAUSES)}


@dataclass(frozen=True, slots=True)
class StepStats:
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
    is_native: bool = False  # one native call or one graph replayed it, without the interpreter between operations
    scored_tokens: int = 0  # prompt tokens whose log-probabilities were computed too

    @property
    def phase(self) -> Phase:
        """Phase of the step; any prefill makes it `prefill`."""
        return "encode" if self.encode_tokens else "prefill" if self.prefill_tokens else "decode"

    @property
    def kind(self) -> StepKind:
        """Kind of the step; a step that does nothing is `decode`."""
        if self.encode_tokens:
            return "encode"
        if self.prefill_tokens:
            return "mixed" if self.num_decode_sequences else "prefill"
        return "decode"

    @property
    def num_rows(self) -> int:
        return self.num_decode_sequences + self.draft_tokens

    @property
    def corrected_seconds(self) -> float:
        """Throttle-corrected seconds: under a CPU quota, a single step's time is off by whole quota periods."""
        return self.seconds * self.throttle_correction

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all phases, including accepted draft tokens."""
        return self.prefill_tokens + self.decode_tokens + self.encode_tokens

    def expected_seconds(self, steps: StepTimeTable) -> float:
        """Return the seconds that a step time table gives for such a step; 0 if it has no such steps."""
        if self.encode_tokens:
            return steps.encode(self.encode_tokens, self.encode_pairs)
        behind = self.prefill_pairs // self.prefill_tokens if self.prefill_tokens else 0
        return steps.mixed(self.num_rows, self.prefill_tokens, self.context_tokens, behind)


_NOT_IN_INFO = frozenset(["added_seconds"])  # of a table that was learned, whose times the points describe as well
# Fields that were renamed, and their keys in `GET /info`, which are a contract.
_INFO_KEYS = {"step_times": "tempo", "draft_tokens": "guesses", "tokens_per_step": "tokens_made"}


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The worker's state after a step, replaced as a whole, so that any thread reads one consistent value.

    `stepped_at` is its `time.monotonic()`. `rows` are the decoding sequences, as (tokens generated, most tokens still
    to come), `prompts` the sequences in prefill, as (tokens computed, tokens to compute). `queue` has the tokens of
    each sequence that waits for a slot, and of texts and program batches. All are in order.
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

    def to_json(self) -> dict[str, Any]:
        def renamed(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {_INFO_KEYS.get(name, name): value for name, value in items if name not in _NOT_IN_INFO}

        return asdict(self, dict_factory=renamed) | {"kv_usage_ratio": self.kv_usage_ratio}


class StepLog:
    """A ring of the last `capacity` steps in plain columns: one thread adds, any thread reads.

    65,536 steps take 2 MB, and adding a row allocates no lasting object.
    """

    def __init__(self, capacity: int = CAPACITY_STEPS) -> None:
        self._capacity = capacity
        self._at, self._seconds = array("d", bytes(8 * capacity)), array("d", bytes(8 * capacity))
        self._phase, self._cause = array("B", bytes(capacity)), array("B", bytes(capacity))
        self._tokens = array("l", bytes(array("l").itemsize * capacity))
        self.num_steps = 0  # written last: a row is complete before it is counted

    def add(self, began_at: float, step: StepStats, cause: Cause | None) -> None:
        """Add a step that began at this Unix time; `cause` if it was slow."""
        place = self.num_steps % self._capacity
        self._at[place] = began_at
        self._seconds[place] = step.seconds
        self._phase[place] = _PHASE_NUMBERS[step.phase]
        self._cause[place] = _CAUSE_NUMBERS[cause]
        self._tokens[place] = step.num_tokens
        self.num_steps += 1

    def since(self, after: int) -> dict[str, Any]:
        """Return at most `MAX_STEPS` steps from number `after` on, oldest first.

        `next` is the number to request next, `dropped` how many of the requested steps were overwritten.
        """
        first = min(max(after, self.num_steps - self._capacity), self.num_steps)
        following = min(first + MAX_STEPS, self.num_steps)
        columns = [
            self._slice_ring(column, first, following)
            for column in (self._at, self._seconds, self._phase, self._tokens, self._cause)
        ]
        lost = min(
            max(self.num_steps - self._capacity - first, 0), following - first
        )  # overwritten while they were read
        at, seconds, phases, tokens, causes = (column[lost:] for column in columns)
        steps = {
            "at": [round(moment, 6) for moment in at],
            "seconds": [round(one, 7) for one in seconds],
            "phase": [_PHASES[number] for number in phases],
            "tokens": list(tokens),
            "cause": [_CAUSES[number] or "" for number in causes],
        }
        return {"next": following, "dropped": max(first + lost - after, 0), "steps": steps}

    def _slice_ring(self, column: Sequence[Any], first: int, following: int) -> list[Any]:
        begin, count = first % self._capacity, following - first
        around = max(begin + count - self._capacity, 0)
        return [*column[begin : begin + count], *column[:around]]
