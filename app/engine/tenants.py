"""Gives each sequence its slot and takes it back: the one place where a sequence's words about KV memory and the pool's are kept equal."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.batch import Copy
from app.engine.prefix import leaning, placements
from app.engine.sequence import Sequence
from app.engine.slots import MIN_SHARED_TOKENS, Placement, SlotPool


class Tenants:
    """Sequences in slots. Copies pile up until the next batch takes them; they are done in order, before anything else of that batch."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._copies: list[Copy] = []

    def admit(self, sequence: Sequence) -> bool:
        """Places a waiting sequence with room for all its tokens, reusing what is cached; False where it has to wait."""
        return any(self._move_in(sequence, placement) for placement in self._options(sequence))

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `admit` would find a place; nothing changes."""
        return any(self.pool.fits(placement, len(sequence.token_ids)) for placement in self._options(sequence))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Places a child that continues what its parent has computed."""
        assert parent.slot is not None, "only a running sequence has children"
        return self._move_in(child, leaning(self.pool.slots[parent.slot], parent.num_computed))

    def grow(self, sequence: Sequence, num_more: int = 0) -> bool:
        """Room for all tokens of a running sequence, and so many guessed or to come; False where there is none without preempting."""
        assert sequence.slot is not None, "a running sequence has a slot"
        return self.pool.reserve(sequence.slot, len(sequence.token_ids) + num_more)

    def trim(self, sequence: Sequence) -> None:
        """Guesses that were wrong leave no account behind: nobody is ever preempted for one."""
        assert sequence.slot is not None, "a running sequence has a slot"
        self.pool.trim(sequence.slot, len(sequence.token_ids))

    def computed(self, sequence: Sequence, end: int) -> None:
        """The step has computed a running sequence up to `end`."""
        assert sequence.slot is not None, "a computed sequence has a slot"
        sequence.num_computed = end
        self.pool.computed(sequence.slot, end)

    def leave(self, sequence: Sequence, keep: int) -> None:
        """Takes the slot back; the first `keep` computed tokens stay cached."""
        assert sequence.slot is not None, "a running sequence has a slot"
        self._copies = [copy for copy in self._copies if copy.target != sequence.slot]
        self.pool.release(sequence.slot, keep)
        sequence.slot, sequence.prefix_slot, sequence.prefix_tokens, sequence.num_computed = None, None, 0, 0

    def take_copies(self) -> tuple[Copy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def _options(self, sequence: Sequence) -> Iterator[Placement]:
        # A further choice's prompt was computed for it on purpose, so it takes however little there is.
        # A search begins in a slot of its own, which its beams will lean on.
        minimum = MIN_SHARED_TOKENS if sequence.choice == 0 else 1
        return placements(self.pool.slots, sequence.token_ids, sequence.is_beam, minimum)

    def _move_in(self, sequence: Sequence, placement: Placement) -> bool:
        slot = self.pool.place(placement, sequence.token_ids)
        if slot is None:
            return False
        sequence.slot, sequence.num_computed = slot, placement.cached
        sequence.num_admitted += 1
        sequence.prefix_slot, sequence.prefix_tokens = placement.prefix_slot, placement.prefix_tokens
        self._copies += [Copy(source, slot, start, end) for source, start, end in placement.copies]
        return True
