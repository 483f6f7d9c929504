"""Expressions over names against Python's `re`, and those that take `re` exponential time."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.weights.lora.rules import NamePattern, Steps, UnsupportedPattern
from hypothesis_examples import examples

_ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        r"\d",
        r"\w",
        r"\W",
        "[ab]",
        "[^a.]",
        "[a-c0]",
        "0",
        "_",
        "^",
        "$",
        r"\b",
        r"[\d.]",
        "{",
    ]
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,}", "{,2}", "{0,1}?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
        parts.map(lambda part: f"(?={part})"),
        parts.map(lambda part: f"(?!{part})"),
    ),
    max_leaves=8,
)


@given(_PATTERNS, st.text(alphabet="ab.0_-", max_size=8))
@settings(max_examples=examples(400))
def test_the_same_names_match_as_with_re(pattern: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole, end = re.compile(f"(?:{pattern})\\Z"), re.compile(rf"(.*\.)?({pattern})\Z")
        except re.error:
            return
    try:
        found = NamePattern(pattern, Steps())
    except UnsupportedPattern as error:
        assert "repeated repetition" in str(error)
        return
    assert found.matches(name) is (whole.match(name) is not None)
    assert found.matches_end(name) is (end.match(name) is not None)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize(
    "pattern", ["((a*)*)*b", "(a|a)*b", "(a|aa)+$b", "(a?){30}a{30}b", "(.*)*(.*)*(.*)*b", ".*" * 60 + "b"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    steps = Steps()
    assert not NamePattern(pattern, steps).matches("a" * 200)
    assert steps.left > 0


def test_the_steps_of_all_patterns_are_bounded() -> None:
    pattern = NamePattern("(a|b)*c", Steps(100))
    with pytest.raises(UnsupportedPattern, match="too many steps"):
        pattern.matches("ab" * 100)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[a",
        "a**",
        "a*+",
        "*a",
        r"(a)\1",
        r"\B",
        "(?P<n>a)",
        "(?i)a",
        "(?<=a)b",
        "a{2,1}",
        "\\",
        r"\q",
        "[",
        "a" * 5000 + "*",
    ],
)
def test_what_is_not_supported_is_said(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern, match=r"\w{3} ?"):
        NamePattern(pattern, Steps())
