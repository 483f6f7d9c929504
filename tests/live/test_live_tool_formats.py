"""Forced calls in the formats of chat templates, over every dialect that can force them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import DEMO_DIRECTORY
from app.text.tool_formats import TOOL_FORMATS, split_pattern
from tests.live.live_server import LiveServer, live

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
FORMATS = ("qwen3_coder", "glm45", "deepseek_v31", "lfm2", "openai")


def template(name: str) -> str:
    """A chat template that writes calls of a format."""
    form = TOOL_FORMATS[name]
    before, _, after = map(json.dumps, form.forced)
    if form.is_pythonic:
        parameter = "{{ key }}={{ value | tojson }}{{ '' if loop.last else ', ' }}"
    else:
        fill = {"key": "{{ key }}", "value": "{{ value if value is string else value | tojson }}", "string": "true"}
        parameter = "".join(fill.get(part, part) for part in split_pattern(form.parameter))
    parameters = "{% for key, value in call.function.arguments.items() %}" + parameter + "{% endfor %}"
    parts = {
        "name": "{{ call.function.name }}", "arguments": "{{ call.function.arguments | tojson }}", "parameters": parameters,
    }  # fmt: skip
    call = "".join(parts.get(part, part) for part in split_pattern(form.call))
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
        f"{{% if message.tool_calls %}}{{{{ {before} }}}}{{% for call in message.tool_calls %}}{call}{{% endfor %}}"
        f"{{{{ {after} }}}}{{% endif %}}{{% endfor %}}[assistant]"
    )


@pytest.fixture(scope="module", params=FORMATS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(template(request.param), encoding="utf-8")
    with live(DEMO_DIRECTORY, chat_template=str(path), served_model_name="demo") as server:
        yield server


def check(name: Any, arguments: Any) -> None:
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather" and read.keys() == {"city", "days"}
    assert read["city"] in ("Paris", "Rome") and 1 <= read["days"] <= 9


FUNCTION = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
ASK = [{"role": "user", "content": "weather?"}]


@pytest.mark.cases(ci=5)
@pytest.mark.full
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_chat(running: LiveServer, choice: Any) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"model": "demo", "messages": ASK, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls" and not message["content"]
    check(message["tool_calls"][0]["function"]["name"], message["tool_calls"][0]["function"]["arguments"])
    streamed = httpx.post(f"{running.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    calls = [
        call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls") or ()
    ]
    check(calls[0]["function"]["name"], "".join(call["function"].get("arguments") or "" for call in calls))


@pytest.mark.full
def test_responses(running: LiveServer) -> None:
    body = {
        "model": "demo",
        "input": "weather?",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
    }
    answer = httpx.post(f"{running.url}/v1/responses", json=body | {"parallel_tool_calls": False}, timeout=60).json()
    (call,) = (item for item in answer["output"] if item["type"] == "function_call")
    check(call["name"], call["arguments"])


@pytest.mark.full
def test_anthropic(running: LiveServer) -> None:
    tool = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"model": "demo", "max_tokens": 400, "messages": ASK, "tools": [tool], "tool_choice": choice}
    answer = httpx.post(f"{running.url}/v1/messages", json=body, timeout=60).json()
    (call,) = (block for block in answer["content"] if block["type"] == "tool_use")
    assert answer["stop_reason"] == "tool_use"
    check(call["name"], call["input"])
