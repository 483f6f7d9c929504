"""Sampling parameters refuse what cannot be honoured, naming the field; the messages themselves are plain values."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from app import errors
from app.errors import InvalidRequest
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Abort,
    Array,
    ArraysReady,
    Command,
    Encode,
    Event,
    Generate,
    GrammarSource,
    Infer,
    LoadedAdapter,
    PromptScored,
    RequestFailed,
    RunTask,
    SamplingParams,
    SequenceFinished,
    SetAdapter,
    Stop,
    Text,
    Timings,
    TokenLogprob,
    TokenScore,
    TokensReady,
)
from app.metrics.steps import EngineSnapshot


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


LOGPROB = TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0)))
ARRAY = Array("FP32", (1, 2), b"\0" * 8)
SOURCE = GrammarSource("json_schema", '{"type": "object"}', "response_format")
TABLE = StepTimeTable(((1, 1.0), (2, 1.5)), ((1, 1.0),))
# One of each message that the engine's mailbox takes, and of those that come back.
MESSAGES: dict[type, object] = {
    Generate: Generate("r", (1, 2), SamplingParams(stop=("a",)), 0.5, ((3,),), SOURCE, LoadedAdapter(0, 1), "salt"),
    Encode: Encode("r", (Text((1, 2), (0, 1), 1),), ("embedding",), 0.5, True, 8),
    Infer: Infer("r", {"x": ARRAY}, ("y",), 0.5),
    RunTask: RunTask("r", "fill-mask", b'["a"]', b"{}", 0.5, (b"file",)),
    Abort: Abort("r", "stop", 1),
    SetAdapter: SetAdapter(0, is_loaded=True),
    Stop: Stop(),
    PromptScored: PromptScored("r", (TokenScore(5, -0.5, 1, ((5, -0.5),)),)),
    TokensReady: TokensReady("r", 0, (5,), (LOGPROB,), Timings(0.1)),
    SequenceFinished: SequenceFinished("r", 0, "stop", stop_token_id=2, stop_logprob=LOGPROB),
    ArraysReady: ArraysReady("r", {"y": ARRAY}, Timings(encode_seconds=0.1), 2),
    EngineSnapshot: EngineSnapshot(1, rows=((1, 2),), step_times=StepTimes(TABLE, 64)),
}
ERRORS = [one for one in errors.__dict__.values() if isinstance(one, type) and issubclass(one, errors.RequestError)]


def test_there_is_an_example_of_each_message() -> None:
    assert MESSAGES.keys() == {*get_args(Command), *get_args(Event), EngineSnapshot} - {RequestFailed}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_is_plain_data_that_another_process_could_read(kind: type) -> None:
    _check_plain(kind)
    message = MESSAGES[kind]
    assert pickle.loads(pickle.dumps(message)) == message
    field = next(iter(get_type_hints(kind)), "any")
    with pytest.raises((AttributeError, TypeError)):
        setattr(message, field, None)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_what_its_client_is_told(kind: type[errors.RequestError]) -> None:
    more = (
        {"retry_after_seconds": 2.5} if issubclass(kind, errors.Overloaded | errors.NotReady) else {"field": "prompt"}
    )
    error = kind("It cannot be served.", **more)  # type: ignore[arg-type]
    found = pickle.loads(pickle.dumps(RequestFailed("r", error)))
    assert (found.request_id, type(found.error), vars(found.error)) == ("r", kind, vars(error))


def _check_plain(hint: Any) -> None:
    """Check that a type has no callables, futures or live objects."""
    if hint in (str, int, float, bool, bytes, type(None), Ellipsis) or get_origin(hint) is Literal:
        return
    if get_origin(hint) in (tuple, Mapping, UnionType, Union):
        for argument in get_args(hint):
            _check_plain(argument)
        return
    assert isinstance(hint, type), hint
    is_frozen = (
        hint.__struct_config__.frozen
        if issubclass(hint, msgspec.Struct)
        else dataclasses.is_dataclass(hint) and hint.__dataclass_params__.frozen  # type: ignore[attr-defined]
    )
    assert is_frozen, hint
    for field in get_type_hints(hint).values():
        if get_origin(field) is not ClassVar:
            _check_plain(field)


@pytest.mark.parametrize("hint", [Callable[[], None], Any, asyncio.Future, list[int], object])
def test_what_is_not_plain_is_noticed(hint: Any) -> None:
    with pytest.raises(AssertionError):
        _check_plain(hint)


def test_usage_of_no_memory_is_nought() -> None:
    assert EngineSnapshot().kv_usage_ratio == 0.0
    assert EngineSnapshot(kv_used_tokens=1, kv_capacity_tokens=4).kv_usage_ratio == 0.25
