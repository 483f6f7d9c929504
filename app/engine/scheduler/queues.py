"""Request queues on counts: waiting and running sequences, oldest first, their transitions, and request limits."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field, replace
from operator import attrgetter

from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.beam_search import BeamGroup
from app.engine.scheduler.kv_allocator import KvAllocator, KvSlots
from app.errors import ContextLengthExceeded, InvalidRequest, RequestError
from app.messages import Generate
from app.metrics.stats import EngineSnapshot


@dataclass(slots=True)
class ActiveRequest:
    """The active sequences of a request; its held choices wait for the prompt. A search's beams are one choice."""

    active: list[Sequence]
    held: list[Sequence] = field(default_factory=list)
    group: BeamGroup | None = None


class RequestQueues:
    """The active requests, and their sequences: held, waiting (no slot) or running (a slot)."""

    def __init__(self, allocator: KvAllocator) -> None:
        self.requests: dict[str, ActiveRequest] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._allocator = allocator

    def add(self, choices: list[Sequence]) -> None:
        """Add a new request, the youngest of its priority. Its first choice waits for a slot."""
        group = BeamGroup(choices[0]) if choices[0].is_beam else None
        self.requests[choices[0].request_id] = ActiveRequest(choices, choices[1:], group)
        insort(self.waiting, choices[0], key=attrgetter("order"))

    def start(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=attrgetter("order"))

    def admit(self, sequence: Sequence | None = None) -> Sequence | None:
        """Move a waiting sequence, by default the oldest, to the running list; None if there is no capacity for it."""
        sequence = sequence or self.waiting[0]
        if not self._allocator.admit(sequence):
            return None
        self.waiting.remove(sequence)
        self.start(sequence)
        return sequence

    def oldest_width(self) -> int:
        return self.waiting[0].params.beam_width if self.waiting else 0

    def num_occupied(self) -> int:
        """Return the occupied places: running sequences, and places into which a beam search may still grow."""
        growing = {one.request_id: one.params.beam_width for one in self.running if one.is_beam}
        return sum(growing.values()) + sum(not one.is_beam for one in self.running)

    def preempt(self) -> None:
        """Take the slot of the youngest running sequence, or its search's slots. It waits and computes again."""
        victim = self.running[-1]
        group = self.requests[victim.request_id].group
        for sequence in list(group.beams) if group else [victim]:
            self.release_slot(sequence)
        insort(self.waiting, group.restart() if group else victim, key=attrgetter("order"))

    def release_slot(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Take a sequence out of its slot. Its computed tokens stay cached; of a beam only the prompt does."""
        if sequence.slot is None:
            return
        keep = sequence.num_prompt_tokens if sequence.is_beam else len(sequence.token_ids)
        self.running.remove(sequence)
        self._allocator.release(sequence, keep if keep_tokens else 0)

    def enqueue_held_choices(self, sequence: Sequence) -> None:
        """Move the held choices of a request to the waiting list, once its prompt is computed and can be shared."""
        request = self.requests[sequence.request_id]
        for choice in request.held:
            insort(self.waiting, choice, key=attrgetter("order"))
        request.held.clear()

    def remove(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Remove a finished choice. If others were held until it computed the prompt, the next one takes over."""
        request = self.requests[sequence.request_id]
        leaving = request.group.beams if request.group else [sequence]
        for one in sorted(leaving, key=lambda beam: beam.prefix_slot is None):  # nothing is kept because it is shared
            self.release_slot(one, keep_tokens)
        request.active.remove(sequence)
        was_held = sequence in request.held
        if was_held:
            request.held.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if request.held and not was_held:
            insort(self.waiting, request.held.pop(0), key=attrgetter("order"))
        if not request.active:
            del self.requests[sequence.request_id]

    def snapshot(self) -> EngineSnapshot:
        """Return the counts of running and waiting sequences. Cached slots do not count as used."""
        pool = self._allocator.pool
        rows: list[tuple[int, int]] = []
        prompts: list[tuple[int, int]] = []
        context = 0
        for sequence in self.running:  # a single pass, because this runs after every step
            length = len(sequence.token_ids)
            num_completion_tokens, uncomputed = length - sequence.num_prompt_tokens, length - sequence.num_computed
            if uncomputed == 1 and num_completion_tokens > 0:
                rows.append((num_completion_tokens, sequence.max_length - length))
                context += length
            else:
                prompts.append((sequence.num_computed, uncomputed))
        return EngineSnapshot(
            num_running=len({sequence.request_id for sequence in self.running}),
            kv_used_tokens=pool.in_use_tokens(),
            kv_capacity_tokens=pool.capacity_tokens,
            rows=tuple(rows),
            context_tokens=context,
            prompts=tuple(prompts),
            queue=tuple([len(sequence.token_ids) for sequence in self.waiting]),
        )


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine; `max_model_len` counts prompt and completion together."""

    max_model_len: int
    max_running_seqs: int
    max_batch_tokens: int

    def limited_by(self, pool: KvSlots) -> EngineLimits:
        """Return these limits, reduced so that one sequence alone fits the pool and all decodes fit one step."""
        return replace(
            self,
            max_model_len=min(self.max_model_len, pool.capacity_tokens),
            max_running_seqs=min(self.max_running_seqs, self.max_batch_tokens, len(pool.slots)),
        )


def request_error(request: Generate, limits: EngineLimits, pool: KvSlots) -> RequestError | None:
    """Return the error for a request that can never be served; None if it can be served."""
    num_prompt, width = len(request.token_ids), request.params.beam_width
    if num_prompt == 0:
        return InvalidRequest("The prompt has no tokens.", field="prompt")
    if num_prompt >= limits.max_model_len:
        return ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens; with at least one of completion the context holds {limits.max_model_len}.",
            field="prompt",
        )
    # one slot is needed for the prompt that the beams share
    widest = min(limits.max_running_seqs, len(pool.slots) - 1)
    if width > max(widest, 1):
        return InvalidRequest(
            f"beam_width is at most {max(widest, 1)} on this server, not {width}.", field="beam_width"
        )
    if width > 1 and request.grammar is not None:
        return InvalidRequest("beam_width cannot be combined with structured output.", field="beam_width")
    if max_sequence_tokens(request, limits, pool) < num_prompt + (request.params.max_tokens != 0):
        return ContextLengthExceeded(
            f"A prompt of {num_prompt} tokens with beam_width {width} does not fit the KV cache of {pool.capacity_tokens} tokens.",
            field="prompt",
        )
    return None


def max_sequence_tokens(request: Generate, limits: EngineLimits, pool: KvSlots) -> int:
    """Return the most tokens of the request's sequences, with which it fits if it is alone in the pool."""
    num_prompt, params = len(request.token_ids), request.params
    bound = (
        limits.max_model_len if params.max_tokens is None else min(limits.max_model_len, num_prompt + params.max_tokens)
    )
    if params.beam_width == 1:
        return bound
    # The prompt is stored once. The root and each beam store a completion, and each end needs a separate page.
    capacity = pool.capacity_tokens - num_prompt - (2 * params.beam_width + 1) * pool.tokens_per_page
    return min(bound, num_prompt + capacity // (params.beam_width + 1))
