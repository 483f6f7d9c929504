"""Prompts have the length that was asked for, are the same in every run, and share no more than their prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature_bench.http.workload import FREQUENT_WORDS, TokenPrompts


@given(st.integers(1, 300), st.integers(0, 50))
def test_a_prompt_has_its_length_and_its_prefix(num_tokens: int, shared: int) -> None:
    deck = TokenPrompts(range(2, 90))
    prefix = deck.prompt(shared)
    prompt = deck.prompt(num_tokens, prefix)
    assert len(prompt) == num_tokens
    assert prompt[:shared] == prefix[:num_tokens]


def test_the_same_seed_deals_the_same_prompts() -> None:
    assert TokenPrompts(range(50), seed=3).prompt(20) == TokenPrompts(range(50), seed=3).prompt(20)
    assert TokenPrompts(range(50), seed=3).prompt(20) != TokenPrompts(range(50), seed=4).prompt(20)


def test_two_prompts_differ() -> None:
    deck = TokenPrompts(range(50))
    assert deck.prompt(20) != deck.prompt(20)


def test_one_token_is_no_deck() -> None:
    with pytest.raises(ValueError, match="two different"):
        TokenPrompts([5, 5])


def test_the_words_are_many() -> None:
    assert len(set(FREQUENT_WORDS.split())) > 60
