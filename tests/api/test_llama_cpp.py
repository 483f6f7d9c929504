"""llama.cpp's completion and server routes, tokenizer routes of three dialects, and routes without a prefix."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import ContextLengthExceeded
from app.messages import Timings
from app.metrics.steps import EngineSnapshot
from app.service.requests import ChoiceFinished, GenerationRequest, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import CountingMetrics, ScriptedService, events


def sent(service: ScriptedService) -> GenerationRequest:
    return service.requests[-1]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_completion(client: httpx.AsyncClient, service: ScriptedService, path: str) -> None:
    body = (await client.post(path, json={"prompt": "Once", "n_predict": 5, "temperature": 0})).json()
    assert (body["content"], body["stop"], body["tokens"], body["stop_type"]) == ("Hello there", True, [], "eos")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["prompt"]) == (2, 3, "Once")
    assert body["generation_settings"]["n_predict"] == 5
    timings = body["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (3, 0, 2)
    assert (timings["predicted_ms"], timings["predicted_per_second"]) == (4.0, 500.0)
    assert (sent(service).api, sent(service).params.max_tokens, sent(service).clips_max_tokens) == (
        "llama_cpp",
        5,
        True,
    )


async def test_events(client: httpx.AsyncClient) -> None:
    told = events(await client.post("/completion", json={"prompt": "a", "stream": True, "n_predict": -1}))
    assert [event["content"] for event in told] == ["Hello", " there", ""]
    assert [event["stop"] for event in told] == [False, False, True]
    assert [event["tokens_predicted"] for event in told] == [1, 2, 2]
    assert [event["tokens"] for event in told] == [[100], [101], []]
    assert told[-1]["generation_settings"]["n_predict"] == -1


async def test_prompts_of_every_form(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.post("/completion", json={"prompt": [7, 8]})).json()["prompt"] == "\x07\x08"
    assert sent(service).token_ids == (7, 8)
    assert (await client.post("/completion", json={"prompt": [7, "ab", 8]})).status_code == 200
    assert sent(service).token_ids == (7, 97, 98, 8)
    assert (await client.post("/completion", json={"prompt": ["ab"]})).status_code == 200
    assert sent(service).prompt == "ab"
    assert (await client.post("/completion", json={"prompt": {"prompt_string": "cd"}})).status_code == 200
    assert sent(service).prompt == "cd"
    several = (await client.post("/completion", json={"prompt": ["ab", [7], ["a", 8]]})).json()
    assert [one["index"] for one in several] == [0, 1, 2]
    assert [(one.prompt, one.token_ids) for one in service.requests[-3:]] == [
        ("ab", None),
        (None, (7,)),
        (None, (1, 97, 8)),
    ]


async def test_sampling_fields(client: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {
        "prompt": "a", "top_k": -1, "seed": -1, "repeat_penalty": 1.1, "stop": ["x"], "grammar": 'root ::= "a"',
        "logit_bias": [[5, 1.5], ["ab", False], ["6", -2]], "mirostat": 0, "dry_multiplier": 0.0, "cache_prompt": True,
        "samplers": ["top_k"], "xtc_threshold": 0.1, "typical_p": 1.0,
    }  # fmt: skip
    assert (await client.post("/completion", json=body)).status_code == 200
    params = sent(service).params
    assert (params.top_k, params.seed, params.repetition_penalty, params.stop) == (0, None, 1.1, ("x",))
    assert params.logit_bias == ((5, 1.5), (97, -100.0), (98, -100.0), (6, -2.0))
    assert params.max_tokens is None
    grammar = sent(service).grammar
    assert grammar is not None
    assert grammar.kind == "grammar"
    assert (await client.post("/completion", json={"prompt": "a", "json_schema": {}})).status_code == 200
    assert sent(service).grammar is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_and_a_stop_word(client: httpx.AsyncClient, service: ScriptedService, stream: bool) -> None:
    other = ScoredToken(6, "Ho", b"Ho", -1.5)
    scored = ScoredToken(5, "Hi", b"Hi", -0.5, (other,))
    end = ChoiceFinished(0, "stop", Usage(1, 0, 1), 1, Timings(), matched_stop="x")
    service.scripts = [[TextDelta(0, "Hi\n", (5,), (scored,)), end]]
    answer = await client.post(
        "/completion", json={"prompt": "a", "n_probs": 1, "stream": stream, "return_tokens": True}
    )
    told = events(answer) if stream else [answer.json()]
    assert told[0]["completion_probabilities"] == [
        {
            "id": 5, "token": "Hi", "logprob": -0.5, "bytes": [72, 105],
            "top_logprobs": [{"id": 6, "token": "Ho", "logprob": -1.5, "bytes": [72, 111]}],
        }
    ]  # fmt: skip
    assert told[0]["tokens"] == [5]
    assert (told[-1]["stop_type"], told[-1]["stopping_word"], told[-1]["has_new_line"]) == ("word", "x", True)
    assert sent(service).params.logprobs == 1


@pytest.mark.parametrize(("ignored", "biases"), [(True, [(2, None), (3, None)]), (False, [])])
async def test_ignored_ends_are_biases_in_the_settings(
    client: httpx.AsyncClient, ignored: bool, biases: list[tuple[int, None]]
) -> None:
    body = (await client.post("/completion", json={"prompt": "a", "ignore_eos": ignored})).json()
    settings = body["generation_settings"]["logit_bias"]
    assert [(entry["token"], entry["bias"]) for entry in settings] == biases


@pytest.mark.parametrize(("num_completion_tokens", "truncated"), [(508, False), (509, True)])
async def test_the_end_of_the_context_truncates(
    client: httpx.AsyncClient, service: ScriptedService, num_completion_tokens: int, truncated: bool
) -> None:
    assert service.model.limits.max_model_len == 3 + 509
    finished = ChoiceFinished(0, "length", Usage(3, 0, num_completion_tokens), num_completion_tokens, Timings())
    service.scripts = [[TextDelta(0, "a", (5,)), finished]]
    assert (await client.post("/completion", json={"prompt": "a"})).json()["truncated"] is truncated


@pytest.mark.parametrize("path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"])
async def test_tokens_of_a_chat_are_counted(client: httpx.AsyncClient, path: str) -> None:
    counted = await client.post(path, json={"messages": [{"role": "user", "content": "Hello"}]})
    assert counted.json() == {"input_tokens": 1}
    refused = await client.post(path, json={"messages": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_selected_fields(client: httpx.AsyncClient) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing"]
    body = (await client.post("/completion", json={"prompt": "a", "n_predict": 4, "response_fields": fields})).json()
    assert body == {"content": "Hello there", "generation_settings/n_predict": 4}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": [5]}}, "multimodal_data"),
        ({"prompt": "a", "multimodal_data": ["aGk="]}, "use prompt"),
        ({"prompt": ["[img-1]", "a"], "image_data": [{"id": 1, "data": "aGk="}]}, "needs a prompt that is one text"),
        ({"prompt": "[img-2]", "image_data": [{"id": 1, "data": "aGk="}]}, "prompt has [img-2]"),
        ({"prompt": "a", "image_data": [{"id": 1, "data": "aGk="}]}, "image_data[0] has the id 1"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [1, *(["a"] * 129)]}, "at most 128 strings"),
        ({"prompt": "a", "n_predict": 0}, "n_predict must be"),
        ({"prompt": "a", "repeat_penalty": 0}, "repeat_penalty must be"),
        ({"prompt": "a", "logit_bias": [[5]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [["", "x"]]}, "logit_bias"),
        ({"prompt": "a", "post_sampling_probs": True, "n_probs": 1, "top_p": 0.5}, "post_sampling_probs needs top_k"),
        ({"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ({"prompt": "a", "tools": [{}]}, "tools is not supported: use /v1/completions"),
        ({"prompt": ["a"] * 64, "n": 3}, "The number of prompts times n"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, metrics: CountingMetrics, body: Any, text: str) -> None:
    response = await client.post("/completion", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert text in error["message"]
    assert metrics.refusals == ["llama_cpp"]


async def test_the_services_refusal(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.scripts = [[ContextLengthExceeded("Too long.", field="prompt")]]
    response = await client.post("/completion", json={"prompt": "a"})
    assert response.json()["error"]["type"] == "exceed_context_size_error"


# ---- the server ----------------------------------------------------------------------------------------------------


async def test_health(client: httpx.AsyncClient, service: ScriptedService) -> None:
    for path in ("/health", "/ping"):
        assert (await client.get(path)).json() == {"status": "ok"}
    service.ready, service.stage = False, "loading"
    for path in ("/health", "/ping"):
        loading = await client.get(path)
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
        assert loading.json()["error"]["type"] == "unavailable_error"


async def test_properties_and_slots(client: httpx.AsyncClient, service: ScriptedService) -> None:
    properties = (await client.get("/props")).json()
    assert (properties["total_slots"], properties["model_path"], properties["eos_token"]) == (4, "demo", "<e>")
    settings = properties["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["seed"]) == (512, -1)
    service.snapshot = EngineSnapshot(num_running=3)
    slots = (await client.get("/slots?fail_on_no_slot=1")).json()
    assert [slot["is_processing"] for slot in slots] == [True, True, True, False]
    service.snapshot = EngineSnapshot(num_running=4)
    assert (await client.get("/slots")).status_code == 200
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 503


async def test_the_chat_template(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]}
    assert (await client.post("/apply-template", json=body)).json() == {"prompt": "system: Be kind.\nuser: Hi"}


# ---- the tokenizer -------------------------------------------------------------------------------------------------


async def test_llama_cpps_tokenizer_bodies(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"content": "ab"})).json() == {"tokens": [97, 98]}
    special = (await client.post("/tokenize", json={"content": "ab", "add_special": True})).json()
    assert special == {"tokens": [1, 97, 98]}
    pieces = (await client.post("/tokenize", json={"content": "aé", "with_pieces": True})).json()
    assert pieces == {"tokens": [{"id": 97, "piece": "a"}, {"id": 233, "piece": [233]}]}
    assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"content": "ab"}


async def test_vllms_tokenizer_bodies(client: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    told = (await client.post("/tokenize", json=body)).json()
    assert (told["tokens"], told["count"], told["max_model_len"], told["token_strs"]) == ([97, 98], 2, 512, ["a", "b"])
    assert (await client.post("/detokenize", json={"model": "demo", "tokens": [97]})).json() == {"prompt": "a"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False, "tools": tools}
    assert (await client.post("/tokenize", json=chat)).json()["count"] == 2
    assert (await client.post("/tokenize", json=chat | {"add_special_tokens": True})).json()["count"] == 1 + len(
        "user: a"
    )
    assert (await client.post("/tokenize", json=body | {"model": "other"})).status_code == 404
    info = (await client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["tokenizer_class"]) == ("<e>", "PreTrainedTokenizerFast")
    assert info["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("path", "body"), [("tokenize", {}), ("tokenize", {"prompt": "a", "content": "a"}), ("detokenize", {}),
                       ("detokenize", {"tokens": [1], "token_ids": [1]}), ("detokenize", {"tokens": ["a"]})],
)  # fmt: skip
async def test_tokenizer_refusals(client: httpx.AsyncClient, path: str, body: Any) -> None:
    response = await client.post(f"/{path}", json=body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"code", "message", "field"}


# ---- routes without a prefix ---------------------------------------------------------------------------------------


async def test_openais_routes_without_a_prefix(client: httpx.AsyncClient, service: ScriptedService) -> None:
    chat = await client.post("/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert chat.json()["object"] == "chat.completion"
    assert (await client.post("/responses", json={"input": "a"})).json()["object"] == "response"
    assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()
    assert (await client.get("/models/demo")).json()["id"] == "demo"
    refused = await client.post("/embeddings", json={"input": "a"})
    assert refused.json()["error"]["code"] == "wrong_model_kind"
    assert [request.api for request in service.requests] == ["chat", "responses"]
