"""Sampling parameters refuse what cannot be honoured, naming the field; the messages themselves are plain values."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from app.errors import InvalidRequest
from app.messages import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Generate,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    TokensReady,
)
from app.metrics.stats import EngineSnapshot


def test_the_defaults_are_neutral_and_valid() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        1.0,
        1.0,
        0,
        0.0,
        1.0,
    )
    assert not params.greedy
    assert SamplingParams(temperature=0.0).greedy


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.5),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("seed", 2**63),
        ("n", 0),
        ("n", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("beam_width", 0),
        ("beam_width", 9),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "stop", [("x",) * (MAX_STOP_STRINGS + 1), ("x",) * 10_000, ("",), ("x" * (MAX_STOP_CHARACTERS + 1),)]
)
def test_too_many_empty_and_too_long_stop_strings_are_refused(stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=stop)
    assert caught.value.field == "stop"


def test_the_longest_stop_strings_are_taken() -> None:
    SamplingParams(stop=("x" * MAX_STOP_CHARACTERS,) * MAX_STOP_STRINGS)


def test_a_beam_search_returns_at_most_its_beams() -> None:
    assert SamplingParams(beam_width=2, n=2).n == 2
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(beam_width=2, n=3)
    assert caught.value.field == "n"


@pytest.mark.parametrize(
    "message", [Generate, TokensReady, SequenceFinished, RequestFailed, EngineSnapshot, SamplingParams]
)
def test_messages_are_frozen(message: type) -> None:
    assert dataclasses.is_dataclass(message)
    assert message.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_messages_are_plain_enough_to_be_pickled() -> None:
    command = Generate("r", (1, 2), SamplingParams(stop=("a",)), 0.0)
    assert pickle.loads(pickle.dumps(command)) == command


def test_usage_of_no_memory_is_nought() -> None:
    assert EngineSnapshot().kv_usage_ratio == 0.0
    assert EngineSnapshot(kv_used_tokens=1, kv_capacity_tokens=4).kv_usage_ratio == 0.25
