"""Fields that a server does not know: ignored, logged once and counted on every route; those in a table are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.application import ROUTES
from app.api.routing import ModelNames
from app.api.schemas import Body, NewNames, parse_body
from app.errors import UnsupportedParameter
from fake_encoder import CLASSIFIER, CONFIG, CROSS_ENCODER
from tests.api.encoder_client import asking
from tests.api.scripted_service import CountingMetrics

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "a"}]}
PROMPT: Json = {"prompt": "a"}
# A body for each route of a decoder, and the API that its requests count for.
GENERATING: dict[str, tuple[Json, str]] = {
    "/v1/chat/completions": (CHAT, "chat"),
    "/v1/chat/completions/input_tokens": (CHAT, "chat"),
    "/apply-template": (CHAT, "chat"),
    "/v1/completions": (PROMPT, "completions"),
    "/invocations": (PROMPT, "completions"),
    "/v1/responses": ({"input": "a"}, "responses"),
    "/v1/responses/input_tokens": ({"input": "a"}, "responses"),
    "/v1/messages": (CHAT | {"max_tokens": 5}, "messages"),
    "/v1/messages/count_tokens": (CHAT, "messages"),
    "/api/chat": (CHAT | {"model": "demo"}, "ollama"),
    "/api/generate": (PROMPT | {"model": "demo"}, "ollama"),
    "/api/show": ({"model": "demo"}, "ollama"),
    "/api/pull": ({"model": "demo"}, "ollama"),
    "/completion": (PROMPT, "llama_cpp"),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, "llama_cpp"),
    "/generate": (PROMPT, "native"),
    "/tokenize": (PROMPT, "native"),
    "/detokenize": ({"token_ids": [65]}, "native"),
    "/decode": ({"ids": [65]}, "native"),
    "/v2/models/demo/generate": ({"text_input": "a"}, "oip"),
    "/v2/models/demo/generate_stream": ({"text_input": "a"}, "oip"),
    "/v2/repository/index": ({}, "oip"),
}
RELEVANCE: Json = {"query": "the fox", "documents": ["hello"]}
# The same of encoders, with the model.
ENCODING: dict[str, tuple[Any, Json, str]] = {
    "/v1/embeddings": (CONFIG, {"input": "hello"}, "embeddings"),
    "/pooling": (CONFIG, {"input": "hello"}, "embeddings"),
    "/encode": (CONFIG, {"inputs": "hello"}, "embeddings"),
    "/embed": (CONFIG, {"inputs": "hello"}, "embeddings"),
    "/": (CONFIG, {"inputs": "hello"}, "embeddings"),
    "/embed_all": (CONFIG, {"inputs": "hello"}, "embeddings"),
    "/v1/embed": (CONFIG, {"texts": ["hello"]}, "embeddings"),
    "/v2/embed": (
        CONFIG,
        {"texts": ["hello"], "embedding_types": ["float"], "input_type": "search_query"},
        "embeddings",
    ),
    "/api/embed": (CONFIG, {"model": "tiny", "input": "hello"}, "ollama"),
    "/api/embeddings": (CONFIG, {"model": "tiny", "prompt": "hello"}, "ollama"),
    "/v1/classify": (CLASSIFIER, {"input": "hello"}, "classify"),
    "/predict": (CLASSIFIER, {"inputs": "hello"}, "classify"),
    "/similarity": (CONFIG, {"inputs": {"source_sentence": "a", "sentences": ["hello"]}}, "rerank"),
    "/v1/score": (CROSS_ENCODER, {"queries": "the fox", "documents": ["hello"]}, "rerank"),
    "/v1/rerank": (CROSS_ENCODER, RELEVANCE, "rerank"),
    "/v2/rerank": (CROSS_ENCODER, RELEVANCE, "rerank"),
    "/rerank": (CROSS_ENCODER, {"query": "the fox", "texts": ["hello"]}, "rerank"),
    "/v2/models/tiny/infer": (
        CONFIG,
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]},
        "oip",
    ),
}
# Twenty fields that nobody knows, with values of every kind, and some that clients do send.
UNKNOWN: Json = {
    **{f"field_{number}": number for number in range(6)},
    "client_metadata": {"session": "1"},
    "temprature": 0.5,
    "Ünknown": "x",
    "with space": True,
    "line\nbreak": [1, [2, {"deep": None}]],
    "escape\x1b[31m": {},
    "ttl": "5m",
    "user": "u",
    "provider": {"order": ["a"]},
    "x-header": [],
    "rtl\u202e": 1.5,
    "usage_tier": "low",
    "__proto__": {"a": 1},
    "": 7,
}


def test_there_are_twenty() -> None:
    assert len(UNKNOWN) == 20


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "it is ignored" in record.getMessage()]


@pytest.mark.parametrize("path", GENERATING)
async def test_each_is_ignored_and_logged_once(
    path: str, client: httpx.AsyncClient, metrics: CountingMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body, api = GENERATING[path]
    for _ in range(2):
        response = await client.post(path, json=body | UNKNOWN)
        assert response.status_code == 200, response.text
    found = lines_of(caplog)
    assert [sum(f"{api} have {name!r}, which" in line for line in found) for name in UNKNOWN] == [1] * len(UNKNOWN)
    assert len(found) == len(UNKNOWN)
    assert metrics.ignored == [(api, len(UNKNOWN))] * 2


@pytest.mark.parametrize("path", ENCODING)
async def test_and_on_the_routes_of_encoders(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config, body, api = ENCODING[path]
    async with asking(config) as (client, _):
        for _ in range(2):
            response = await client.post(path, json=body | UNKNOWN)
            assert response.status_code == 200, response.text
        rendered = (await client.get("/metrics")).text
    assert len(lines_of(caplog)) == len(UNKNOWN)
    assert f'armature_ignored_fields_total{{api="{api}"}} {2.0 * len(UNKNOWN)}' in rendered


def body_models() -> dict[str, type[Body]]:
    """The body of each route that has one."""
    return {route.path_format: route.body for route in ROUTES if route.body is not None}


def test_every_route_is_tried() -> None:
    tried = {path.replace("/demo/", "/{name}/").replace("/tiny/", "/{name}/") for path in (*GENERATING, *ENCODING)}
    tried |= {path.removeprefix("/v1") for path in tried}
    # These change which adapters or models are loaded, or are refused whatever they have.
    left = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/embed_sparse", "/models/load", "/models/unload"}
    routes = {path.replace("/versions/{version}", "") for path in body_models()}
    # Models that transformers computes are too large for these tests: tests/live/test_live_tasks.py.
    # Instances are a program's: tests/api/test_oip_pictures.py.
    apart = ("/v2/repository/models/", "/pipeline/", "/models/{name}", "/v1/models/{name}:", "/predictions/")
    missing = {path for path in routes - tried - left if not path.startswith(apart)}
    assert not missing


# ---- what is refused -----------------------------------------------------------------------------------------------


def refusals() -> Iterator[tuple[type[Body], Json, str]]:
    bodies = body_models()
    examples = {path: body for path, (body, _) in GENERATING.items()}
    examples |= {path: body for path, (_, body, _) in ENCODING.items()}
    seen = set()
    for path, body in examples.items():
        model = bodies.get(path.replace("/demo/", "/{name}/").replace("/tiny/", "/{name}/"))
        if model is None or model in seen or path == "/invocations":
            continue
        seen.add(model)
        for name in (*model.REFUSED, *model.FOREIGN):
            if name not in model.model_fields:
                yield model, body, name


def test_each_field_of_the_tables_is_refused_by_name_with_advice() -> None:
    count = 0
    for model, body, name in refusals():
        count += 1
        with pytest.raises(UnsupportedParameter) as refused:
            parse_body(model, json.dumps(body | {name: {"no": "such value"}}).encode())
        assert refused.value.field == name, (model, name)
        assert refused.value.message.startswith(name) and len(refused.value.message) > len(name) + 25
        for neutral in (None, *(model.REFUSED[name].neutral if name in model.REFUSED else ())):
            parse_body(model, json.dumps(body | {name: neutral}).encode())
    assert count > 300


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", ["chat_template", "audio", "web_search_options", "regex", "system", "mirostat", "input"]),
        ("/v1/completions", ["prompt_embeds", "messages", "ebnf", "logits_processors", "xtc_probability"]),
        ("/v1/responses", ["store", "background", "previous_response_id", "conversation", "prompt", "messages"]),
        ("/v1/messages", ["container", "mcp_servers", "compaction", "seed", "stop", "response_format", "prompt"]),
        ("/api/chat", ["temperature", "max_tokens", "system", "response_format"]),
        ("/api/generate", ["suffix", "template", "context", "messages"]),
        ("/completion", ["dry_multiplier", "lora", "multimodal_data", "response_format", "tools", "messages"]),
        ("/generate", ["tools", "guided_json", "sampling_params", "messages", "return_hidden_states"]),
        ("/v2/models/{name}/generate", ["stop_words", "random_seed", "response_format", "prompt"]),
        ("/v1/embeddings", ["input_type", "output_dimension", "normalize", "texts"]),
        ("/v1/rerank", ["max_chunks_per_doc", "instruction", "inputs"]),
        ("/v2/embed", ["images", "max_tokens", "input"]),
        ("/predict", ["input"]),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_in_a_table(path: str, fields: list[str]) -> None:
    model = body_models()[path]
    assert set(fields) <= {*model.REFUSED, *model.FOREIGN}


def all_bodies(model: type[Body] = Body) -> Iterator[type[Body]]:
    for each in model.__subclasses__():
        yield each
        yield from all_bodies(each)


def test_the_page_lists_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    listed = page.split("## Fields")[1].split("\n## ")[0]
    names = {name for model in all_bodies() for name in model.REFUSED if name not in model.model_fields}
    assert not {name for name in names if f"`{name}`" not in listed}


# ---- nested objects ------------------------------------------------------------------------------------------------


async def test_nested_fields_are_named_without_their_place(
    client: httpx.AsyncClient, metrics: CountingMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    message = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "new": 1}
    tool = {"type": "function", "function": {"name": "f", "returns": {}}, "cache_control": {}}
    body = {"messages": [message] * 3, "tools": [tool, {"type": "web_search", "filters": {}}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    names = {line.split("'")[1] for line in lines_of(caplog)}
    assert names == {
        "messages[].new", "messages[].content[].cache_control", "tools[].cache_control", "tools[].function.returns",
        "tools[].type=web_search",
    }  # fmt: skip
    assert metrics.ignored == [("chat", 5)]


# Fields that other servers write into their answers and clients send back, and fields of their own requests.
ECHOED: list[Json] = [
    {"role": "assistant", "content": "b", "reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
    {"role": "assistant", "content": "b", "provider_specific_fields": {"a": 1}, "thinking_blocks": [{"type": "thinking"}]},
    {"role": "assistant", "content": "b", "annotations": [{"type": "url_citation"}], "audio": {"id": "a"}, "refusal": "x"},
    {"role": "assistant", "content": "b", "metadata": {"a": 1}, "cache_control": {"type": "ephemeral"}, "images": []},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": []},
    {"role": "assistant"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "b", "prefix": False, "partial": False},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{
            "id": "c", "type": None, "index": 0, "extra_content": {"google": {}}, "thought_signature": "x",
            "function": {"name": "f", "arguments": "{}", "returns": None},
        }],
    },
    {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "d", "is_error": False},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]},
]  # fmt: skip


@pytest.mark.parametrize("message", ECHOED)
async def test_a_history_of_other_servers_is_read(message: Json, client: httpx.AsyncClient, service: Any) -> None:
    messages = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "c"}]
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert [each["role"] for each in service.requests[0].messages] == ["user", message["role"], "user"]


async def test_a_picture_in_a_result_is_told_of(client: httpx.AsyncClient, service: Any) -> None:
    await client.post("/v1/chat/completions", json={"messages": [*CHAT["messages"], ECHOED[-1]]})
    assert service.requests[0].messages[1]["content"] == [
        {"type": "text", "text": "[image_url: left out, because this model reads text only]"}
    ]


async def test_thoughts_of_other_servers_are_no_text(client: httpx.AsyncClient, service: Any) -> None:
    await client.post("/v1/chat/completions", json={"messages": [*CHAT["messages"], ECHOED[7], *CHAT["messages"]]})
    assert service.requests[0].messages[1]["content"] == [{"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled"}, "enable_thinking": True, "provider": {"sort": "price"}, "extra_body": {"a": 1}},
        {"num_ctx": 4096, "keep_alive": -1, "client_metadata": {}, "prompt_cache_key": "k", "verbosity": "low"},
        {"max_tokens": -1},
        {"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f", "strict": "true"}}]},
        {"tools": [{"type": None, "function": {"name": "f", "strict": "false", "parameters": None}}]},
        {"tools": [{"type": "custom", "custom": {"name": "f"}}, {"type": "mcp", "server_label": "a"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}], "tool_choice": "required"},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
    ],
)  # fmt: skip
async def test_requests_of_other_servers_clients_are_answered(fields: Json, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 200, response.text


async def test_allowed_tools_are_the_only_ones(client: httpx.AsyncClient, service: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}, {"type": "web_search"}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    await client.post("/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": choice})
    use = service.requests[0].tools
    assert ([tool.name for tool in use.tools], [tool.name for tool in use.forced]) == (["g"], ["g"])


# ---- bounds --------------------------------------------------------------------------------------------------------


async def test_invented_names_fill_neither_log_nor_memory(
    client: httpx.AsyncClient, app: Any, metrics: CountingMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for turn in range(3):
        invented = {f"{turn}-{number}-" + "x" * 500: 1 for number in range(1_500)}
        assert (await client.post("/v1/completions", json=PROMPT | invented)).status_code == 200
    assert len(lines_of(caplog)) == 256
    assert max(map(len, lines_of(caplog))) < 250
    assert metrics.ignored == [("completions", 1_000)] * 3
    assert sum(map(len, app.state.runtime.new_names._seen.values())) == 256


async def test_each_api_has_its_own_names(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    invented = {f"{number}": 1 for number in range(300)}
    await client.post("/v1/completions", json=PROMPT | invented)
    await client.post("/v1/chat/completions", json=CHAT | {"new_field": 1})
    assert "requests of the API chat have 'new_field'" in lines_of(caplog)[-1]


def test_new_names_are_found_once_each_and_no_longer_than_a_bound() -> None:
    names = NewNames()
    assert names.find("a", ["x", "y", "x"]) == ["x", "y"]
    assert names.find("a", ["y", "z" * 200]) == ["z" * 100]
    assert names.find("a", ["z" * 101]) == []
    assert names.find("b", ["x"]) == ["x"]


async def test_a_wrong_model_name_is_logged_once(
    client: httpx.AsyncClient, app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    app.state.runtime = replace(app.state.runtime, names=ModelNames(accepts_any=True))
    for path, (body, _) in GENERATING.items():
        if "{" not in path and "/v2/" not in path and path not in ("/api/pull", "/decode"):
            response = await client.post(path, json=body | {"model": "gpt-4o"})
            assert response.status_code == 200, path
    lines = [record.getMessage() for record in caplog.records if "gpt-4o" in record.getMessage()]
    assert lines == ["requests name the model 'gpt-4o', which is not served here: 'demo' answers them"]
    for path in ("/v1/models/gpt-4o", "/v2/models/gpt-4o", "/v2/models/gpt-4o/ready"):
        assert (await client.get(path)).status_code == 404, f"{path} says what exists"
    assert (await client.post("/api/pull", json={"model": "gpt-4o"})).status_code == 404


# ---- salts ---------------------------------------------------------------------------------------------------------

SALTED = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/completion",
    "/infill", "/generate", "/v2/models/demo/generate", "/v2/models/demo/generate_stream", "/invocations",
]  # fmt: skip


@pytest.mark.parametrize("path", SALTED)
async def test_the_salt_reaches_the_service(path: str, client: httpx.AsyncClient, service: Any) -> None:
    body, _ = GENERATING[path]
    for salt in (None, "tenant"):
        response = await client.post(path, json=body | {"cache_salt": salt})
        assert response.status_code == 200, response.text
        assert service.requests[-1].cache_salt == salt
    for wrong in ("", "x" * 1025, 5, ["a"]):
        response = await client.post(path, json=body | {"cache_salt": wrong})
        assert response.status_code == 400, wrong
        assert "cache_salt" in response.text
    assert len(service.requests) == 2
