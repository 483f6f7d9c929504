"""KV allocation: gives each sequence a slot and takes it back, and keeps the sequence and the slot pool consistent."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.batch import Copy
from app.engine.prefix import leaning, placements
from app.engine.sequence import Sequence
from app.engine.slots import MIN_SHARED_TOKENS, Placement, SlotPool


class Tenants:
    """Allocates slots to sequences.

    Copies are collected until the next batch takes them. They are done in order, before anything else of that
    batch.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._copies: list[Copy] = []

    def admit(self, sequence: Sequence) -> bool:
        """Place a waiting sequence with capacity for all its tokens, and reuse cached KV.

        False if it must wait.
        """
        return any(self._move_in(sequence, placement) for placement in self._options(sequence))

    def has_room(self, sequence: Sequence) -> bool:
        """Return True if `admit` would succeed. Nothing changes."""
        return any(self.pool.fits(placement, len(sequence.token_ids)) for placement in self._options(sequence))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Place a child that continues from the tokens that its parent has computed.

        False if there is no capacity.
        """
        assert parent.slot is not None, "only a running sequence has children"
        return self._move_in(child, leaning(self.pool.slots[parent.slot], parent.num_computed))

    def grow(self, sequence: Sequence, num_more: int = 0) -> bool:
        """Reserve capacity for all tokens of a running sequence and `num_more` draft or future tokens.

        Returns False if this would require a preemption.
        """
        assert sequence.slot is not None, "a running sequence has a slot"
        return self.pool.reserve(sequence.slot, len(sequence.token_ids) + num_more)

    def trim(self, sequence: Sequence) -> None:
        """Release the capacity that was reserved for rejected draft tokens.

        No sequence is ever preempted because of draft tokens.
        """
        assert sequence.slot is not None, "a running sequence has a slot"
        self.pool.trim(sequence.slot, len(sequence.token_ids))

    def computed(self, sequence: Sequence, end: int) -> None:
        """Record that a running sequence is computed up to `end`."""
        assert sequence.slot is not None, "a computed sequence has a slot"
        sequence.num_computed = end
        self.pool.computed(sequence.slot, end)

    def leave(self, sequence: Sequence, keep: int) -> None:
        """Take the slot back. The first `keep` computed tokens stay cached."""
        assert sequence.slot is not None, "a running sequence has a slot"
        self._copies = [copy for copy in self._copies if copy.target != sequence.slot]
        self.pool.release(sequence.slot, keep)
        sequence.slot, sequence.prefix_slot, sequence.prefix_tokens, sequence.num_computed = None, None, 0, 0

    def take_copies(self) -> tuple[Copy, ...]:
        """Return the copies for the next batch, and clear them."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def _options(self, sequence: Sequence) -> Iterator[Placement]:
        # The prompt of a further choice was computed in order to be shared, so any length is reused. A beam search
        # begins in a slot without a shared prefix, because its beams will share that slot.
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
