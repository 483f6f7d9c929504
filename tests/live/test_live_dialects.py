"""The unchanged clients of Anthropic, Ollama and OpenAI's Responses API with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, live
from tiny_encoders import write_encoder

if TYPE_CHECKING:
    import openai

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


GREEDY = {"temperature": 0}


class Trip(BaseModel):
    days: int

    model_config = {"json_schema_extra": {"properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}}


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, served_model_name="demo", any_model_name="on") as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    """A server that refuses other names, and needs a key."""
    with live(DEMO_DIRECTORY, served_model_name="demo", any_model_name="off", api_keys=("secret",)) as server:
        yield server


# ---- Anthropic -----------------------------------------------------------------------------------------------------

TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}


@pytest.fixture
def claude(running: LiveServer) -> Iterator[Any]:
    anthropic: Any = pytest.importorskip("anthropic", reason="the client is not installed: pip install anthropic")
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_anthropic_streams_what_it_answers(claude: Any) -> None:
    asked: Any = {"model": "claude-x", "messages": ASK, "max_tokens": 100_000, "system": "Be kind."}
    asked["extra_body"] = GREEDY
    whole = claude.messages.create(**asked)
    assert whole.content[0].type == "text"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model="claude-x", messages=ASK, system="Be kind.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_anthropic_calls_tools(claude: Any) -> None:
    asked: Any = {"model": "demo", "messages": ASK, "max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "any"}}
    message = claude.messages.create(**asked)
    call = message.content[0]
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] in ("Paris", "Rome")
    with claude.messages.stream(**asked, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message().content[0]
    assert streamed.input.keys() == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    history = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(model="demo", messages=history, max_tokens=5, tools=[TOOL])
    assert answer.content


def test_anthropics_errors(strict: LiveServer) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="the client is not installed: pip install anthropic")
    asked: Any = {"model": "demo", "messages": ASK, "max_tokens": 5}
    with anthropic.Anthropic(base_url=strict.url, api_key="secret", max_retries=0, timeout=60) as client:
        assert client.messages.create(**asked).usage.output_tokens <= 5
        with pytest.raises(anthropic.NotFoundError, match="is not served here"):
            client.messages.create(**asked | {"model": "claude-x"})
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
        with pytest.raises(anthropic.BadRequestError, match="'image'"):
            client.messages.create(**asked | {"messages": [{"role": "user", "content": [image]}]})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(**asked)


# ---- Ollama --------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(running: LiveServer) -> Iterator[Any]:
    ollama: Any = pytest.importorskip("ollama", reason="the client is not installed: pip install ollama")
    with ollama.Client(host=running.url, timeout=60) as client:
        yield client


def test_ollama_streams_what_it_answers(llama: Any) -> None:
    options = {"temperature": 0, "num_predict": 12}
    whole = llama.chat(model="demo", messages=ASK, options=options, keep_alive="5m")
    parts = list(llama.chat(model="demo:latest", messages=ASK, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].done, parts[-1].eval_count) == (True, whole.eval_count)
    said = llama.generate(model="demo", prompt="Once upon a time", raw=True, options=options)
    parts = list(llama.generate(model="demo", prompt="Once upon a time", raw=True, options=options, stream=True))
    assert "".join(part.response for part in parts) == said.response != ""
    assert said.prompt_eval_count > 0


def test_ollama_follows_a_schema(llama: Any) -> None:
    options = {"num_predict": 100, "temperature": 1.0, "seed": 3}
    answer = llama.chat(model="demo", messages=ASK, format=SCHEMA, options=options)
    assert json.loads(answer.message.content)["city"] in ("Paris", "Rome")


def test_ollama_describes_the_model(llama: Any) -> None:
    assert [model.model for model in llama.list().models] == ["demo"]
    assert llama.ps().models[0].model == "demo"
    shown = llama.show("demo")
    assert "completion" in shown.capabilities
    assert any(name.endswith(".context_length") for name in shown.modelinfo)
    assert shown.details.quantization_level == "FP32"


def test_ollama_embeds(tmp_path_factory: pytest.TempPathFactory) -> None:
    ollama: Any = pytest.importorskip("ollama", reason="the client is not installed: pip install ollama")
    path = write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")
    with live(path) as server, ollama.Client(host=server.url, timeout=60) as client:
        embedded = client.embed(model="tiny", input=["the fox said hello", "world"])
        assert len(embedded.embeddings) == 2
        assert sum(value * value for value in embedded.embeddings[0]) == pytest.approx(1, abs=1e-4)
        assert client.embed(model="tiny", input="world").embeddings[0] == pytest.approx(
            embedded.embeddings[1], abs=1e-4
        )
        assert len(client.embeddings(model="tiny", prompt="world").embedding) == len(embedded.embeddings[0])
        assert client.show("tiny").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="generates no text"):
            client.chat(model="tiny", messages=ASK)


# ---- OpenAI's Responses API ----------------------------------------------------------------------------------------


@pytest.fixture
def official(running: LiveServer) -> Iterator[openai.OpenAI]:
    official: Any = pytest.importorskip("openai", reason="the official client is not installed: pip install openai")
    with official.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_responses_stream_what_they_answer(official: openai.OpenAI) -> None:
    asked: Any = {"model": "gpt-4o", "input": "Tell me a story.", "max_output_tokens": 12, "temperature": 0}
    whole = official.responses.create(**asked)
    assert whole.output_text
    assert whole.store is False  # type: ignore[attr-defined]  # the client keeps fields that it does not know
    assert whole.status == "incomplete"
    with official.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    parts = [event.type for event in official.responses.create(**asked, stream=True)]
    assert (parts[0], parts[-1]) == ("response.created", "response.incomplete")


def test_responses_parse_a_type(official: openai.OpenAI) -> None:
    answer = official.responses.parse(model="demo", input="How long?", text_format=Trip, max_output_tokens=60)
    assert answer.output_parsed is not None
    assert 1 <= answer.output_parsed.days <= 9


def test_responses_call_tools(official: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    history: Any = [{"role": "user", "content": "How is the weather?"}]
    answer = official.responses.create(model="demo", input=history, tools=[tool], tool_choice="required")
    call = answer.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    told = official.responses.create(model="demo", input=history, tools=[tool], max_output_tokens=5, tool_choice="none")
    assert told.output_text


def test_responses_are_not_stored(official: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        official.responses.create(model="demo", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="store is not supported"):
        official.responses.create(model="demo", input="Hi", store=True)
