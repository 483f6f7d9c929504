"""Rules of a step on counts, with neither sequences nor tensors.

The engines apply them to their requests, and the predicted wait applies them to the counts of a snapshot, so that
both always follow the same policy.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
)
from typing import TypeVar

T = TypeVar("T")


def share_in_order(requests: Iterable[T], tokens: int, needed: Callable[[T], int]) -> Iterator[tuple[T, int]]:
    """Share the tokens of a step among requests: the oldest gets all that it needs, then the next one.

    `requests` may be lazy: the next request is only taken from it while tokens are left.

    Args:
        requests: The requests, oldest first.
        tokens: The tokens to share.
        needed: Returns the number of tokens that a request can use, at least 1.

    Returns:
        The requests that get tokens, each with their number.
    """
    pending = iter(requests)
    while tokens > 0 and (request := next(pending, None)) is not None:
        given = min(needed(request), tokens)
        tokens -= given
        yield request, given


def admit_oldest(free_places: int, oldest_width: Callable[[], int], admit: Callable[[], T | None]) -> Iterator[T]:
    """Admit waiting requests in order of arrival while places are free, each when it is taken from the iterator.

    If the oldest does not fit, no younger one overtakes it.

    Args:
        free_places: The number of free places.
        oldest_width: Returns the number of places that the oldest waiting request needs; 0 if none waits.
        admit: Admits the oldest waiting request and returns it; None if it does not fit into memory.
    """
    while 0 < (width := oldest_width()) <= free_places and (request := admit()) is not None:
        free_places -= width
        yield request
