"""Request queues: the waiting and running sequences, each list oldest first, and all transitions between them.

It works on counts and never on tensors. The scheduler decides who is computed in a step and which events are sent.
`KvAllocator` assigns slots.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from app.engine.beams import BeamGroup
from app.engine.sequence import Sequence
from app.engine.tenants import Tenants


@dataclass(slots=True)
class Request:
    """The active sequences of a request.

    Further choices are held until the prompt is computed once, and then share it. The beams of a search count as
    one choice.
    """

    alive: list[Sequence]
    held: list[Sequence] = field(default_factory=list)
    group: BeamGroup | None = None


class Roster:
    """The active requests and their sequences.

    A sequence is in at most one list: held, waiting (no slot) or running (a slot).
    """

    def __init__(self, tenants: Tenants) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._tenants = tenants

    def add(self, choices: list[Sequence]) -> None:
        """Add a new request, the youngest of all. Its first choice waits for a slot."""
        group = BeamGroup(choices[0]) if choices[0].is_beam else None
        self.requests[choices[0].request_id] = Request(choices, choices[1:], group)
        self.waiting.append(choices[0])

    def run(self, sequence: Sequence) -> None:
        """Add a sequence that has a slot to the running list."""
        insort(self.running, sequence, key=_age)

    def admit(self) -> Sequence | None:
        """Move the oldest waiting sequence to the running list; None if there is no capacity for it."""
        sequence = self.waiting[0]
        if not self._tenants.admit(sequence):
            return None
        self.run(self.waiting.pop(0))
        return sequence

    def occupied(self) -> int:
        """Return the number of occupied places.

        These are the running sequences and the places into which a beam search may still grow.
        """
        growing = {one.request_id: one.params.beam_width for one in self.running if one.is_beam}
        return sum(growing.values()) + sum(not one.is_beam for one in self.running)

    def preempt(self) -> None:
        """Take the slot of the youngest running sequence, or all slots of its beam search.

        It goes back to the waiting list with its tokens and computes them again.
        """
        victim = self.running[-1]
        group = self.requests[victim.request_id].group
        for sequence in list(group.beams) if group else [victim]:
            self.vacate(sequence)
        insort(self.waiting, group.restart() if group else victim, key=_age)

    def vacate(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Take a sequence out of its slot.

        All computed tokens stay cached for other requests; for a beam only the prompt does.
        """
        if sequence.slot is None:
            return
        keep = sequence.num_prompt_tokens if sequence.is_beam else len(sequence.token_ids)
        self.running.remove(sequence)
        self._tenants.leave(sequence, keep if keep_tokens else 0)

    def let_in_choices(self, sequence: Sequence) -> None:
        """Move the held choices of a request to the waiting list, once its prompt is computed and can be shared."""
        request = self.requests[sequence.request_id]
        for choice in request.held:
            insort(self.waiting, choice, key=_age)
        request.held.clear()

    def end(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Remove a finished choice. If others were held until it computed the prompt, the next one takes over."""
        request = self.requests[sequence.request_id]
        for one in list(request.group.beams) if request.group else [sequence]:
            self.vacate(one, keep_tokens)
        request.alive.remove(sequence)
        was_held = sequence in request.held
        if was_held:
            request.held.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if request.held and not was_held:
            insort(self.waiting, request.held.pop(0), key=_age)
        if not request.alive:
            del self.requests[sequence.request_id]


def _age(sequence: Sequence) -> int:
    return sequence.order
