"""The Open Inference Protocol: server and model metadata, errors, and the generate extension."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.errors import Overloaded, StepFailed
from app.messages import Timings
from app.service.requests import ChoiceFinished, ScoredToken, TextDelta, Usage
from app.version import VERSION
from fake_worker import tokenizer
from tests.api.oip_fakes import decoder, encoder, program, serving
from tests.api.scripted_service import ScriptedService, deltas, events

# ---- the server and its model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
async def test_the_server(client: httpx.AsyncClient, path: str) -> None:
    body = (await client.get(path)).json()
    assert (body["name"], body["version"]) == ("armature", VERSION)
    assert "binary_tensor_data" in body["extensions"]


async def test_health(client: httpx.AsyncClient, service: ScriptedService) -> None:
    assert (await client.get("/v2/health/live")).json() == {"live": True}
    assert (await client.get("/v2/health/ready")).json() == {"live": True, "ready": True}
    service.ready = service.alive = False
    assert (await client.get("/v2/health/live")).status_code == 500
    ready = await client.get("/v2/health/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert int(ready.headers["retry-after"]) > 0


async def test_probes_need_no_key(build: Any) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build(api_keys=("x",))), base_url="http://armature"
    ) as client:
        assert (await client.get("/v2/health/live")).status_code == 200
        assert (await client.get("/v2/health/ready")).status_code == 200
        refused = await client.get("/v2")
        assert (refused.status_code, list(refused.json())) == (401, ["error"])


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_an_encoder(version: str) -> None:
    async with serving(encoder()) as served:
        path = served.path + version
        assert (await served.client.get(f"{path}/ready")).json() == {"name": "tiny/encoder", "ready": True}
        body = (await served.client.get(path)).json()
        assert (body["name"], body["versions"], body["platform"]) == ("tiny/encoder", ["1"], "pytorch_safetensors")
        assert body["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
        assert {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]} in body["inputs"]
        assert body["outputs"] == [
            {"name": "embedding", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "last_hidden_state", "datatype": "FP32", "shape": [-1, -1, 2]},
        ]
        config = (await served.client.get(f"{path}/config")).json()
        assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}
        assert config["input"][2] == {
            "name": "input_ids",
            "data_type": "TYPE_INT64",
            "dims": [-1, -1],
            "optional": True,
        }


async def test_a_classifier_has_scores() -> None:
    async with serving(encoder(("yes", "no", "perhaps"))) as served:
        names = {output["name"]: output["shape"] for output in (await served.client.get(served.path)).json()["outputs"]}
        assert names == {"logits": [-1, 3], "last_hidden_state": [-1, -1, 2], "scores": [-1, 3]}


async def test_a_program_and_a_decoder() -> None:
    async with serving(program()) as served:
        body = (await served.client.get(served.path)).json()
        assert body["inputs"][0] == {"name": "pixels", "datatype": "FP32", "shape": [-1, 2, -1]}
        assert body["platform"] == "pytorch_export"
    async with serving(decoder()) as served:
        body = (await served.client.get(served.path)).json()
        assert [tensor["name"] for tensor in body["inputs"] + body["outputs"]] == ["text_input", "text_output"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/other/ready", 404),
        ("GET", "/v2/models/tiny/encoder/versions/2", 404),
        ("GET", "/v2/models/tiny/encoder/versions/2/ready", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/tiny/encoder/versions/7/infer", 404),
        ("POST", "/v2/models/tiny/encoder/infer", 400),
        ("POST", "/v2/models/tiny/encoder/generate", 400),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/nothing", 404),
    ],
)
async def test_every_refusal_is_one_sentence(method: str, path: str, status: int) -> None:
    """`{"error": "…"}` and nothing else: the protocol's own body, which its clients read."""
    async with serving(encoder()) as served:
        response = await served.client.request(method, path)
        assert response.status_code == status
        assert list(response.json()) == ["error"]
        assert isinstance(response.json()["error"], str)


async def test_while_loading_there_is_no_model(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready = False
    for path in ("/v2/models/demo", "/v2/models/demo/ready"):
        response = await client.get(path)
        assert (response.status_code, list(response.json())) == (503, ["error"])


async def test_a_model_that_is_not_ready_any_more() -> None:
    async with serving(encoder()) as served:
        served.service.drain()
        response = await served.client.get(f"{served.path}/ready")
        assert (response.status_code, response.json()) == (503, {"name": "tiny/encoder", "ready": False})


# ---- generate ------------------------------------------------------------------------------------------------------


class Generating:
    """The scripted service as one of a decoder; `ask` posts to one of the extension's routes."""

    def __init__(self, client: httpx.AsyncClient, service: ScriptedService) -> None:
        self.client, self.service = client, service

    async def ask(self, route: str = "generate", text: str = "Once", **fields: Any) -> httpx.Response:
        return await self.client.post(f"/v2/models/tiny/{route}", content=json.dumps({"text_input": text, **fields}))


@pytest.fixture
def generating(client: httpx.AsyncClient, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Generating:
    monkeypatch.setattr(ScriptedService, "model", decoder())
    monkeypatch.setattr(ScriptedService, "decoder", decoder(), raising=False)
    return Generating(client, service)


async def test_generate(generating: Generating) -> None:
    response = await generating.ask(id="42", parameters={"temperature": 0, "max_tokens": 5, "stop": ["."]})
    assert response.json() == {"id": "42", "model_name": "tiny", "model_version": "1", "text_output": "Hello there"}
    assert "queue" in response.headers["server-timing"]
    (asked,) = generating.service.requests
    assert (asked.prompt, asked.api) == ("Once", "oip")
    assert (asked.params.temperature, asked.params.max_tokens, asked.params.stop) == (0.0, 5, (".",))


async def test_parameters_may_stand_beside_the_text(generating: Generating) -> None:
    await generating.ask(max_tokens=7, parameters={"seed": 3}, stream=False)
    await generating.ask()
    assert [request.params.max_tokens for request in generating.service.requests] == [7, 20]
    assert generating.service.requests[0].params.seed == 3


async def test_generate_stream(generating: Generating) -> None:
    response = await generating.ask("generate_stream", id="7", parameters={"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    about = {"id": "7", "model_name": "tiny", "model_version": "1"}
    assert events(response) == [about | {"text_output": "Hello"}, about | {"text_output": " there"}]


async def test_an_empty_stream_is_one_empty_text(generating: Generating) -> None:
    generating.service.scripts = [deltas()]
    assert [event["text_output"] for event in events(await generating.ask("generate_stream"))] == [""]


@pytest.mark.parametrize(
    ("reason", "matched", "told"),
    [
        ("length", None, "length"),
        ("stop", "!", "stop_sequence"),
        ("stop", 7, "stop_sequence"),
        ("stop", 2, "eos_token"),
    ],
)
async def test_details(generating: Generating, reason: Any, matched: str | int | None, told: str) -> None:
    ids = tokenizer().encode("ab", add_special_tokens=False)
    tokens = tuple(ScoredToken(token_id, text, text.encode(), -0.5) for token_id, text in zip(ids, "ab", strict=True))
    finished = ChoiceFinished(0, reason, Usage(3, 0, 2), 2, Timings(), matched)
    generating.service.scripts = [[TextDelta(0, "ab", tuple(ids), tokens, Timings()), finished]]
    asked = {"details": True, "stop_token_ids": [7]}
    said = [
        {"id": token_id, "text": text, "logprob": -0.5, "special": False}
        for token_id, text in zip(ids, "ab", strict=True)
    ]
    whole = (await generating.ask(parameters=asked)).json()
    assert whole["details"] == {"finish_reason": told, "logprobs": said, "prompt_tokens": 3, "completion_tokens": 2}
    streamed = events(await generating.ask("generate_stream", parameters=asked))
    assert [event["text_output"] for event in streamed] == ["", "ab", ""]
    assert [event["details"]["token"] for event in streamed] == [*said, None]
    assert [event["details"]["finish_reason"] for event in streamed] == [None, None, told]


@pytest.mark.parametrize(
    "fields",
    [
        {"text_input": 7},
        {"parameters": {"max_tokens": 0}},
        {"parameters": {"n": 2}},
        {"parameters": {"stream": True}},
        {"parameters": {"best_of": 2}},
        {"max_tokens": 3, "parameters": {"max_tokens": 3}},
        {"exclude_input_in_output": False},
    ],
)
async def test_what_generate_refuses(generating: Generating, fields: dict[str, Any]) -> None:
    response = (
        await generating.ask(**{"text": "a", **fields})
        if "text_input" not in fields
        else await generating.client.post("/v2/models/tiny/generate", content=json.dumps(fields))
    )
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert not generating.service.requests


async def test_an_error_before_the_stream_has_its_status(generating: Generating) -> None:
    generating.service.scripts = [[Overloaded("Too much.", 3.2)]]
    response = await generating.ask("generate_stream")
    assert (response.status_code, response.json(), response.headers["retry-after"]) == (
        429,
        {"error": "Too much."},
        "4",
    )


async def test_an_error_within_the_stream_is_its_last_event(generating: Generating) -> None:
    generating.service.scripts = [[*deltas("Hello")[:1], StepFailed("It broke.")]]
    assert events(await generating.ask("generate_stream"))[-1] == {"error": "It broke."}


async def test_an_encoder_generates_nothing() -> None:
    async with serving(encoder()) as served:
        response = await served.client.post(f"{served.path}/generate", content=b'{"text_input": "a"}')
        assert (response.status_code, "generates no text" in response.json()["error"]) == (400, True)


async def test_counted_once(generating: Generating, metrics: Any) -> None:
    await generating.ask(parameters={"n": 2})
    assert metrics.refusals == ["oip"]


def test_the_document_describes_the_bodies(app: Any) -> None:
    paths = app.openapi()["paths"]
    assert "requestBody" in paths["/v2/models/{name}/infer"]["post"]
    assert "requestBody" in paths["/v2/models/{name}/versions/{version}/generate_stream"]["post"]


async def test_slashes_in_names() -> None:
    """Names of models may hold slashes, and a version's routes are not taken for a model's name."""
    async with serving(encoder()) as served:
        assert (await served.client.get("/v2/models/tiny%2Fencoder/versions/1/ready")).status_code == 200
