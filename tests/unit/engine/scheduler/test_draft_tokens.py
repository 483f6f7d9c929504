"""Draft tokens from the text's past: the match that is followed, and the small cost of long prompts per step."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from app.engine.scheduler.speculation import MAX_INDEXED_PER_STEP, NGRAM_SIZES, NgramDrafter


def test_what_followed_the_same_three_tokens_is_drafted() -> None:
    assert NgramDrafter().propose([1, 2, 3, 40, 50, 60, 70, 1, 2, 3], 3) == (40, 50, 60)


def test_three_tokens_count_for_more_than_two_that_came_later() -> None:
    assert NgramDrafter().propose([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], 1) == (40,)


def test_of_two_places_the_later_is_followed() -> None:
    assert NgramDrafter().propose([1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3], 1) == (50,)


def test_a_text_that_repeats_itself_is_taken_to_go_on() -> None:
    assert NgramDrafter().propose([5, 7, 8, 7, 8, 7, 8], 5) == (7, 8, 7, 8, 7)


def test_nothing_is_drafted_where_nothing_is_like_it() -> None:
    assert NgramDrafter().propose([1, 2, 3, 4, 5, 6], 4) == ()
    assert NgramDrafter().propose([1], 4) == ()


def test_a_long_prompt_is_read_from_its_end_a_little_at_each_step() -> None:
    """The place that is looked for lies at the very beginning; meanwhile tokens come, and none is passed over."""
    drafter, tokens = NgramDrafter(), [-1, -2, -3, -4, *range(5 * MAX_INDEXED_PER_STEP), -1, -2, -3]
    before = 0
    for question in range(6):
        found = drafter.propose(tokens, 1)
        assert len(drafter._last_ends) - before <= len(NGRAM_SIZES) * MAX_INDEXED_PER_STEP
        before = len(drafter._last_ends)
        assert found == (() if question < 5 else (-4,)), question
    last = 10_000 + 2 * MAX_INDEXED_PER_STEP
    tokens += [*range(10_000, last + 1), -5, last - 2, last - 1]
    assert [drafter.propose(tokens, 1) for _ in range(3)] == [(), (), (last,)]  # what came since is read as slowly


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7), st.randoms(use_true_random=False))
def test_it_is_what_a_search_of_the_whole_text_finds(tokens: list[int], most: int, dice: random.Random) -> None:
    drafter = NgramDrafter()
    for end in sorted({dice.randint(1, len(tokens)) for _ in range(5)} | {len(tokens)}):
        text, expected = tokens[:end], ()
        for size in NGRAM_SIZES:
            places = [at for at in range(size, end) if text[at - size : at] == text[-size:]] if end >= size else []
            if places and not expected:
                period = end - places[-1]
                expected = tuple(text[places[-1] + place % period] for place in range(most))
        assert drafter.propose(text, most) == expected
