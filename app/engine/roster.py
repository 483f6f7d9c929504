"""Who waits and who runs, each list oldest first, and every way into these lists and out of them. Counts only, never a tensor.

Who is computed in a step, and what is told of it, is the scheduler's decision; slots are `tenants.py`'s.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from app.engine.beams import BeamGroup
from app.engine.sequence import Sequence
from app.engine.tenants import Tenants


@dataclass(slots=True)
class Request:
    """What is alive of a request. Further choices are held until the prompt is computed once, then they share it; beams are one choice."""

    alive: list[Sequence]
    held: list[Sequence] = field(default_factory=list)
    group: BeamGroup | None = None


class Roster:
    """The living requests and their sequences. A sequence is in one list at the most: held, waiting (no slot) or running (a slot)."""

    def __init__(self, tenants: Tenants) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._tenants = tenants

    def add(self, choices: list[Sequence]) -> None:
        """A new request, the youngest of all. Its first choice waits for a place."""
        group = BeamGroup(choices[0]) if choices[0].is_beam else None
        self.requests[choices[0].request_id] = Request(choices, choices[1:], group)
        self.waiting.append(choices[0])

    def run(self, sequence: Sequence) -> None:
        """A sequence that was given a slot."""
        insort(self.running, sequence, key=_age)

    def admit(self) -> Sequence | None:
        """The oldest that waits runs now; None where it finds no room."""
        sequence = self.waiting[0]
        if not self._tenants.admit(sequence):
            return None
        self.run(self.waiting.pop(0))
        return sequence

    def occupied(self) -> int:
        """Running sequences, with the places that a beam search may still grow into."""
        growing = {one.request_id: one.params.beam_width for one in self.running if one.is_beam}
        return sum(growing.values()) + sum(not one.is_beam for one in self.running)

    def preempt(self) -> None:
        """Takes the youngest's slot, or its whole search's; it waits for its turn with its tokens and computes them again."""
        victim = self.running[-1]
        group = self.requests[victim.request_id].group
        for sequence in list(group.beams) if group else [victim]:
            self.vacate(sequence)
        insort(self.waiting, group.restart() if group else victim, key=_age)

    def vacate(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """Out of its slot. What stays cached is what others may ask for: all it computed, of beams the prompt alone."""
        if sequence.slot is None:
            return
        keep = sequence.num_prompt_tokens if sequence.is_beam else len(sequence.token_ids)
        self.running.remove(sequence)
        self._tenants.leave(sequence, keep if keep_tokens else 0)

    def let_in_choices(self, sequence: Sequence) -> None:
        """The prompt is computed: the choices that were held for it wait for their turn, and will find it."""
        request = self.requests[sequence.request_id]
        for choice in request.held:
            insort(self.waiting, choice, key=_age)
        request.held.clear()

    def end(self, sequence: Sequence, keep_tokens: bool = True) -> None:
        """A choice is over and forgotten. If the others waited for the prompt that it was computing, the next one takes over."""
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
