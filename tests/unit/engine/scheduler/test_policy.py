"""The rules of a step on counts, which the scheduler and the predicted wait share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.engine.scheduler.policy import admit_oldest, share_in_order


def needs_itself(tokens: int) -> int:
    return tokens


@pytest.mark.parametrize(
    ("tokens", "shares"),
    [(0, []), (-3, []), (5, [(8, 5)]), (8, [(8, 8)]), (9, [(8, 8), (4, 1)]), (99, [(8, 8), (4, 4), (2, 2)])],
)
def test_the_oldest_request_gets_all_that_it_needs_first(tokens: int, shares: list[tuple[int, int]]) -> None:
    assert list(share_in_order([8, 4, 2], tokens, needs_itself)) == shares


def test_no_request_is_taken_once_the_tokens_are_used_up() -> None:
    taken: list[int] = []

    def requests() -> Iterator[int]:
        for tokens in (8, 4, 2):
            taken.append(tokens)
            yield tokens

    assert list(share_in_order(requests(), 12, needs_itself)) == [(8, 8), (4, 4)]
    assert taken == [8, 4], "the third would have been admitted for nothing"


def admitted(widths: list[int], free_places: int, num_fitting: int = 99) -> int:
    """Number of waiting requests of these widths that are admitted, if memory has capacity for `num_fitting`."""
    waiting = list(widths)

    def admit() -> int | None:
        return waiting.pop(0) if len(widths) - len(waiting) < num_fitting else None

    return len(list(admit_oldest(free_places, lambda: waiting[0] if waiting else 0, admit)))


def test_requests_are_admitted_in_order_while_places_are_free() -> None:
    assert admitted([1, 1, 1], 2) == 2
    assert admitted([1, 1], 5) == 2
    assert admitted([1], 0) == admitted([1], -1) == 0
    assert admitted([1, 1, 1], 3, num_fitting=1) == 1


def test_a_younger_request_does_not_overtake_one_that_does_not_fit() -> None:
    assert admitted([1, 4, 1], 3) == 1
    assert admitted([4, 1], 5) == 2


def test_each_request_is_admitted_when_it_is_taken() -> None:
    waiting = [1, 1, 1]
    requests = admit_oldest(3, lambda: 1 if waiting else 0, lambda: waiting.pop(0))
    assert next(requests) == 1
    assert len(waiting) == 2
