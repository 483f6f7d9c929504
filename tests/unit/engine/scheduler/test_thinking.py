"""The limit of a sequence's reasoning: when tokens are forced, and which."""

from __future__ import annotations

import pytest

from app.engine.scheduler.batch import ThinkingState
from app.messages import ThinkingLimit

START, END = (7, 8), (4, 5)
CLOSING = (4, 5, 6)


def written(tokens: list[int], budget: int, *, is_open: bool = True, count: int = 12) -> list[int]:
    """What is written if these tokens are sampled wherever any token may follow."""
    state, free, found = ThinkingState(ThinkingLimit(budget, (START,), (END,), CLOSING, is_open)), iter(tokens), []
    for _ in range(count):
        forced = state.forced_id
        found.append(next(free, 0) if forced is None else forced)
        assert state.after(found[-1:]).forced_id == _advanced(state, found[-1])
    return found


def _advanced(state: ThinkingState, token_id: int) -> int | None:
    state.advance(token_id)
    return state.forced_id


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([1, 1, 1], 2, [1, 1, *CLOSING, 1]),
        ([1, 1, 1], 0, [*CLOSING, 1, 1, 1]),
        ([1, *END, 2, 2, 2, 2], 4, [1, *END, 2, 2, 2, 2]),  # it ends before the limit
        ([1, *END, 2, 2, 2, 2], 3, [1, *END, 2, 2, 2, 2]),  # at the limit
        ([1, 1, END[0], 1], 3, [1, 1, *CLOSING, 1]),  # its end has begun
        ([1, END[0], 1, 1], 3, [1, END[0], 1, *CLOSING, 1]),
    ],
)
def test_an_open_reasoning_is_closed_at_the_limit(tokens: list[int], budget: int, expected: list[int]) -> None:
    assert written(tokens, budget)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*START, 1, 1, 1, 1], [*START, 1, 1, *CLOSING]),
        ([9, *START, 1, 1, 1], [9, *START, 1, 1, *CLOSING]),
        ([1] * 12, [1] * 12),  # it writes none
        ([1] * 7 + [*START, 1, 1, 1], [1] * 7 + [*START, 1, 1, 1]),  # a tag in an answer
    ],
)
def test_a_reasoning_that_the_model_opens_itself(tokens: list[int], expected: list[int]) -> None:
    assert written(tokens, 2, is_open=False)[: len(expected)] == expected


def test_only_the_steps_near_the_limit_are_restricted() -> None:
    state = ThinkingState(ThinkingLimit(1000, (START,), (END,), CLOSING, True))
    assert not state.is_near
    for _ in range(950):
        state.advance(1)
    assert state.is_near
    for token_id in END:
        state.advance(token_id)
    assert state.is_over and not state.is_near
