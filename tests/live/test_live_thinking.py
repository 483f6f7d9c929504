"""A limit of thinking tokens, under each dialect's name: the reasoning is closed there, and an answer follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, live
from tiny_checkpoints import write_checkpoint

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}{% endfor %}"
    "[assistant]{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Once upon"}],
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
}
LIMIT = 12


@pytest.fixture(scope="module", params=["attention", pytest.param("state", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The demo model, and one with the same tokens whose layers have a recurrent state."""
    folder = tmp_path_factory.mktemp("model")
    path, model = folder / "chat.jinja", DEMO_DIRECTORY
    path.write_text(TEMPLATE, encoding="utf-8")
    if request.param == "state":
        model = write_checkpoint(folder / "own", "Qwen3_5ForCausalLM", vocab_size=2048)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_DIRECTORY / name, model)
    with live(model, chat_template=str(path), served_model_name="demo") as running:
        yield running


def post(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    response = server.client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.client.post(path, json={"model": "demo", "stream": True, **body}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def num_tokens(server: LiveServer, text: str) -> int:
    return len(server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])


def check(server: LiveServer, reasoning: str, answer: str) -> None:
    # White space around it is dropped, and the text of random tokens may have more of them.
    assert LIMIT - 3 <= num_tokens(server, reasoning) <= 2 * LIMIT
    assert len(answer) > 20 and "think>" not in answer


@pytest.mark.parametrize(
    "limit",
    [
        {"thinking_token_budget": LIMIT},
        {"thinking_budget": LIMIT},
        {"reasoning": {"max_tokens": LIMIT}},
        {"chat_template_kwargs": {"thinking_budget": LIMIT}},
    ],
    ids=lambda limit: next(iter(limit)),
)
def test_chat(server: LiveServer, limit: dict[str, Any]) -> None:
    message = post(server, "/v1/chat/completions", ASK | limit)["choices"][0]["message"]
    check(server, message["reasoning_content"], message["content"])


def test_every_choice_of_a_stream_is_limited_at_any_temperature(server: LiveServer) -> None:
    body = ASK | {
        "thinking_token_budget": LIMIT,
        "n": 3,
        "temperature": 1.0,
        "seed": 1,
    }
    texts: dict[tuple[int, str], str] = {}
    for event in events(server, "/v1/chat/completions", body):
        for choice in event["choices"]:
            for name in ("reasoning_content", "content"):
                texts[choice["index"], name] = texts.get((choice["index"], name), "") + (
                    choice["delta"].get(name) or ""
                )
    for index in range(3):
        check(server, texts[index, "reasoning_content"], texts[index, "content"])


def test_without_a_limit_or_with_none_it_goes_on(server: LiveServer) -> None:
    for limit in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": 1000}):
        message = post(server, "/v1/chat/completions", ASK | limit)["choices"][0]["message"]
        assert num_tokens(server, message["reasoning_content"]) > 30 and not message["content"]


def test_thinking_that_is_off_has_no_limit(server: LiveServer) -> None:
    body = ASK | {"enable_thinking": False, "thinking_token_budget": LIMIT}
    message = post(server, "/v1/chat/completions", body)["choices"][0]["message"]
    assert not message.get("reasoning_content") and "think>" not in message["content"]


def test_other_dialects(server: LiveServer) -> None:
    """Whole and streamed they say the same."""
    body: dict[str, Any] = ASK | {"thinking": {"type": "enabled", "budget_tokens": LIMIT}}
    thought, said = post(server, "/v1/messages", body)["content"]
    check(server, thought["thinking"], said["text"])
    deltas = [
        event["delta"] for event in events(server, "/v1/messages", body) if event["type"] == "content_block_delta"
    ]
    assert "".join(delta.get("thinking", "") for delta in deltas).strip() == thought["thinking"].strip()
    assert "".join(delta.get("text", "") for delta in deltas).strip() == said["text"].strip()
    body = {"input": "Once upon", "reasoning": {"max_tokens": LIMIT}, "temperature": 0, "max_output_tokens": 60}
    body["ignore_eos"] = True
    thought, said = (one["content"][0]["text"] for one in post(server, "/v1/responses", body)["output"])
    check(server, thought, said)
    deltas = [event for event in events(server, "/v1/responses", body) if event["type"].endswith("text.delta")]
    texts = {word: "".join(one["delta"] for one in deltas if word in one["type"]) for word in ("reasoning", "output")}
    assert (texts["reasoning"].strip(), texts["output"].strip()) == (thought.strip(), said.strip())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": 3, "use_beam_search": True, "n": 2}, "thinking_token_budget"),
    ],
)
def test_limits_that_are_refused(server: LiveServer, body: dict[str, Any], field: str) -> None:
    response = server.client.post("/v1/chat/completions", json={"model": "demo", **ASK, **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
