"""Batch sizes for which decode steps are captured. A smaller step is padded to the next bucket."""

from __future__ import annotations

from bisect import bisect_left

LARGEST = 256  # sequences; above this the step takes the device longer than the host needs to launch it
# (up to, in steps of). Small batches are the common case, and there a padding row costs the most.
_STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (LARGEST, 16))


def buckets_for(most_sequences: int) -> tuple[int, ...]:
    """Return the bucket sizes in ascending order.

    The last one holds `max_sequences`, or is `LARGEST_BUCKET` if that is smaller.
    """
    assert most_sequences > 0, "max_sequences must be positive"
    sizes, size = [1], 1
    for end, step in _STEPS:
        while size < min(end, most_sequences):
            size += step
            sizes.append(size)
    return tuple(sizes)


def bucket_of(sequences: int, buckets: tuple[int, ...]) -> int | None:
    """Return the smallest bucket that holds this number of sequences; None if none does."""
    place = bisect_left(buckets, sequences)
    return buckets[place] if place < len(buckets) else None
