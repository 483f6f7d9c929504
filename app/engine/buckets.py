"""The sizes that decode steps are captured in: a step of fewer sequences is filled up to the next one. Counts only."""

from __future__ import annotations

from bisect import bisect_left

LARGEST = 256  # sequences: beyond, the device is busy with a step for longer than the host needs to ask for it
# Up to, in steps of: few sequences are the common case, and there a row too many costs most.
_STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (LARGEST, 16))


def buckets_for(most_sequences: int) -> tuple[int, ...]:
    """Ascending; the last one holds `most_sequences`, or is the largest there is."""
    assert most_sequences > 0, "a step has a sequence"
    sizes, size = [1], 1
    for end, step in _STEPS:
        while size < min(end, most_sequences):
            size += step
            sizes.append(size)
    return tuple(sizes)


def bucket_of(sequences: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest that holds so many; None where none does."""
    place = bisect_left(buckets, sequences)
    return buckets[place] if place < len(buckets) else None
