"""Answers over a real connection: whole, streamed as they grow, through OpenAI's own client, and refused without harm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from app.api.bodies import MAX_BODY_BYTES
from tests.live.live_server import LiveServer, live
from tiny_checkpoints import write_checkpoint

CHAT: list[Any] = [{"role": "user", "content": "Tell me a story."}]

if TYPE_CHECKING:
    import openai


@pytest.fixture
def official(server: LiveServer) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_stream_and_an_answer_are_the_same(server: LiveServer) -> None:
    whole = server.generate(max_tokens=12).json()
    assert whole["finish_reason"] == "length"
    assert len(whole["token_ids"]) == 12
    with server.client.stream(
        "POST", "/generate", json={"prompt": "Once upon", "temperature": 0, "max_tokens": 12, "stream": True}
    ) as told:
        assert told.headers["content-type"].startswith("text/event-stream")
        assert re.fullmatch(r"queue;dur=[\d.]+, prefill;dur=[\d.]+", told.headers["server-timing"])
        events = [json.loads(line.removeprefix("data: ")) for line in told.iter_lines() if line]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["token_ids"]] == whole["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_events_come_while_the_engine_works(server: LiveServer) -> None:
    body = {"prompt": "Once upon", "max_tokens": 50, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body) as told:
        lines = (line for line in told.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
        server.reins.hold()
        assert server.reins.reached.wait(60)  # 50 tokens are not done, and the first is here
        server.reins.release()
        assert list(lines)[-1] == "data: [DONE]"


def test_the_official_client(official: openai.OpenAI) -> None:
    chat = official.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = chat.choices
    assert chat.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == chat.usage.completion_tokens
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    text = official.completions.create(model="tiny", prompt=["Once", "Twice"], max_tokens=4, n=2, seed=1)
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").object == "model"


def test_the_official_client_streams(official: openai.OpenAI) -> None:
    whole = official.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, temperature=0)
    stream = official.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_the_official_client_understands_refusals(official: openai.OpenAI) -> None:
    import openai

    assert official.chat.completions.create(model="gpt-9", messages=CHAT, max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        official.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as refused:
        official.chat.completions.create(model="tiny", messages=CHAT, extra_body={"beam_width": 3})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "beam_width")
    with pytest.raises(openai.BadRequestError, match="generates text"):
        official.embeddings.create(model="tiny", input="x")


def test_beams_and_ids(server: LiveServer) -> None:
    ids = server.client.post("/tokenize", json={"prompt": "Once upon"}).json()["token_ids"]
    answer = server.client.post("/generate", json={"token_ids": ids, "beam_width": 3, "max_tokens": 5}).json()
    assert answer["token_ids"]
    text = server.client.post("/detokenize", json={"token_ids": answer["token_ids"]}).json()["text"]
    assert text == answer["text"]


def test_what_does_not_fit_the_context(server: LiveServer) -> None:
    for body in ({"prompt": "x" * 5_000}, {"token_ids": [5] * 256}, {"prompt": "x", "max_tokens": 257}):
        response = server.client.post("/generate", json={"stream": True, **body})
        assert response.status_code == 400, body
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("token_ids", [[-1], [320], [2**62]])
def test_ids_that_are_no_tokens(server: LiveServer, token_ids: list[int]) -> None:
    response = server.client.post("/generate", json={"token_ids": token_ids})
    assert (response.status_code, response.json()["error"]["field"]) == (400, "token_ids")


def test_a_body_of_100_megabytes(server: LiveServer) -> None:
    """The client gets to read why, though it is still sending when that is said."""
    response = server.client.post(
        "/v1/completions", content=b" " * 100 * 2**20, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    unannounced = server.client.post("/generate", content=(b" " * 2**20 for _ in range(100)))
    assert unannounced.status_code == 413


def test_a_body_just_within_the_limit(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "user": "x"}'
    padded = b'{"prompt": "a", "max_tokens": 1' + b" " * (MAX_BODY_BYTES - len(body)) + b"}"
    assert (
        server.client.post("/generate", content=padded, headers={"content-type": "application/json"}).status_code == 200
    )


def test_probes_scrapes_and_the_page(server: LiveServer) -> None:
    assert server.client.get("/healthz").json() == {"status": "alive"}
    told = server.client.get("/info").json()
    assert told["model"]["name"] == "tiny"
    assert told["plan"]["threads"]["value"] == 1
    assert told["capacity"]["kv_capacity_tokens"] > 0
    before = server.metric("armature_requests_total", api="native", outcome="length")
    server.generate(max_tokens=1)
    assert server.metric("armature_requests_total", api="native", outcome="length") == before + 1
    openmetrics = server.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.text.rstrip().endswith("# EOF")
    assert httpx.get(f"{server.url}/", follow_redirects=True).status_code == 200


def test_a_format_of_torchao_serves_a_chat(tmp_path: Path) -> None:
    name = "torchao:IntxWeightOnlyConfig(weight_dtype=int8, granularity=PerGroup(16))"
    with live(write_checkpoint(tmp_path / "tiny"), precision="auto", quantization=name) as server:
        planned = server.client.get("/info").json()["plan"]["precision"]
        assert planned["value"] == name and "torchao" in planned["reason"]
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 6
        exact = server.generate(max_tokens=6, ignore_eos=True).json()["token_ids"]
    with live(tmp_path / "tiny") as server:
        assert len(exact) == 6 and exact[0] == server.generate(max_tokens=6, ignore_eos=True).json()["token_ids"][0]
