"""The unchanged OpenAI client with a real model: schemas, tools, agents' histories and its streaming helpers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, live

if TYPE_CHECKING:
    import openai

pytest.importorskip("openai", reason="the official client is not installed: pip install openai")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


class Person(BaseModel):
    name: str
    size: int

    model_config = {"json_schema_extra": {"properties": {
        "name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0, "maximum": 99},
    }}}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, served_model_name="demo,other", any_model_name="on") as server:
        yield server


@pytest.fixture
def official(running: LiveServer) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parse_returns_the_type(official: openai.OpenAI, temperature: float) -> None:
    answer = official.chat.completions.parse(
        model="gpt-4o", messages=ASK, response_format=Person, temperature=temperature, seed=1, max_tokens=100
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)
    assert answer.model == "demo"


def test_several_choices_follow_the_schema(official: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    answers = [
        official.chat.completions.create(
            model="demo", messages=ASK, response_format=form, n=4, seed=7, temperature=1.5, max_tokens=60
        )
        for _ in range(2)
    ]
    texts = [[choice.message.content or "" for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1], "the same seed gives the same texts"
    assert len(set(texts[0])) > 1
    for text in texts[0]:
        trip = json.loads(text)
        assert trip["city"] in ("Paris", "Rome") and 1 <= trip["days"] <= 9


def test_an_agents_round(official: openai.OpenAI) -> None:
    first = official.chat.completions.create(
        model="demo", messages=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content is None and message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = official.chat.completions.create(
        model="demo", messages=[*ASK, message, result], tools=[WEATHER], max_tokens=8
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_the_streaming_helper_reads_calls(official: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": named, "temperature": 0.0, "max_tokens": 80}
    with official.chat.completions.stream(model="demo", messages=ASK, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    streamed = final.choices[0].message.tool_calls
    whole = official.chat.completions.create(model="demo", messages=ASK, **fields).choices[0].message.tool_calls
    assert streamed and whole and whole[0].type == "function"
    assert streamed[0].function.arguments == whole[0].function.arguments


def test_refusals_say_what_is_wrong(official: openai.OpenAI) -> None:
    import openai

    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"pattern": "x"}}}}
    with pytest.raises(openai.BadRequestError, match='"not"'):
        official.chat.completions.create(model="demo", messages=ASK, response_format=form)
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        official.chat.completions.create(model="demo", messages=image)


def test_the_models_names(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == ["demo", "other"]
    assert official.models.retrieve("other").id == "other"


def test_the_checkpoints_sampling_defaults_are_named(running: LiveServer) -> None:
    assert running.client.get("/info").json()["sampling_defaults"] == {"temperature": 0.8, "top_p": 0.95}
