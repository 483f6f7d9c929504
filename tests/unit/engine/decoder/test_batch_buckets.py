"""Every number of sequences has a bucket that holds it, and not much more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.decoder.cuda_graphs import LARGEST_BUCKET, bucket_sizes, smallest_bucket


def test_few_sequences_have_buckets_of_their_own_and_many_share() -> None:
    assert bucket_sizes(LARGEST_BUCKET)[:11] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bucket_sizes(LARGEST_BUCKET)[11:] == tuple(range(80, 257, 16))


@pytest.mark.parametrize(("most", "last"), [(1, 1), (3, 4), (60, 64), (65, 80), (256, 256), (1000, 256)])
def test_the_last_bucket_holds_the_most_that_run(most: int, last: int) -> None:
    assert bucket_sizes(most)[-1] == last


@given(st.integers(1, 400), st.integers(1, 400))
def test_a_step_is_filled_up_to_the_next_bucket(most: int, sequences: int) -> None:
    buckets = bucket_sizes(most)
    bucket = smallest_bucket(sequences, buckets)
    if sequences > buckets[-1]:
        assert bucket is None
        return
    assert bucket is not None and bucket >= sequences
    assert all(smaller < sequences for smaller in buckets if smaller < bucket)
    assert bucket <= 2 * sequences, "no more than half of a step's rows are nobody's"
