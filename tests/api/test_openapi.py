"""The OpenAPI document: valid, complete, with the errors of each API in its own format."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from referencing.exceptions import Unresolvable

from app.api.application import DIALECTS, ROUTES, error_format
from tests.api.scripted_service import CountingMetrics, ScriptedService

Json = dict[str, Any]
ALL_BODY_ERRORS = {"400", "401", "408", "413", "429", "500", "503", "default"}
# Routes that hand work to the engine, and those that may name another model than the served one.
WORKING = "chat completions generate generate_stream embeddings embed encode rerank classify infer".split()
WORKING += "responses messages chat completion score pooling".split()
PUBLIC = {"/healthz", "/readyz", "/health", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready"}
WORKING_TEI = {"/", "/embed_all", "/predict", "/rerank", "/similarity"}


@pytest.fixture
def document(app: Any) -> Json:
    return copy.deepcopy(app.openapi())


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def invalid(document: Json) -> list[str]:
    """What makes the document invalid by OpenAPI's own schema."""
    try:
        return [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()]
    except Unresolvable as error:
        return [f"a reference leads nowhere: {error.ref}"]


def incomplete(document: Json) -> list[str]:
    """What is missing in the document, in sentences."""
    described = {(method.upper(), path) for method, path, _ in operations(document)}
    found = [f"{route.path} is missing" for route in ROUTES if (route.method, route.path_format) not in described]
    for method, path, operation in operations(document):
        missing = expected_statuses(method, path) - set(operation["responses"])
        found += [f"{method} {path} does not list {status}" for status in sorted(missing)]
        found += [f"{method} {path} has no summary or tag" for name in ("summary", "tags") if not operation.get(name)]
    return found


def expected_statuses(method: str, path: str) -> set[str]:
    """Statuses that the operation can return, by what kind of operation it is."""
    public = path in PUBLIC or (method, path) == ("get", "/")
    expected = {"500", "default"} if public else {"401", "500", "default"}
    if method == "post":
        expected |= ALL_BODY_ERRORS
        if path in WORKING_TEI or path.rsplit("/", 1)[-1] in WORKING:
            expected.add("504")
    names_a_model = "{name}" in path or (path.startswith("/v1/") and method == "post")
    return expected | ({"404", "503"} if names_a_model else set())


def drop_parameter(document: Json) -> None:
    del document["paths"]["/v2/models/{name}/infer"]["post"]["parameters"][0]


def repeat_operation_id(document: Json) -> None:
    document["paths"]["/encode"]["post"]["operationId"] = "post_generate"


def drop_schema(document: Json) -> None:
    del document["components"]["schemas"]["OpenAIErrorDetail"]


def keep_converter(document: Json) -> None:
    document["paths"]["/v1/models/{name:path}"] = document["paths"].pop("/v1/models/{name}")


def drop_status(document: Json) -> None:
    del document["paths"]["/v1/embeddings"]["post"]["responses"]["429"]


def drop_route(document: Json) -> None:
    del document["paths"]["/similarity"]


PLANTED = (
    *((invalid, plant) for plant in (drop_parameter, repeat_operation_id, drop_schema)),
    *((incomplete, plant) for plant in (keep_converter, drop_status, drop_route)),
)


def test_the_document_is_valid_and_complete(document: Json) -> None:
    assert invalid(document) == incomplete(document) == []


@pytest.mark.cases(ci=3)
@pytest.mark.full
@pytest.mark.parametrize(("faults", "plant"), PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
def test_a_planted_fault_is_found(
    document: Json, faults: Callable[[Json], list[str]], plant: Callable[[Json], None]
) -> None:
    plant(document)
    assert faults(document) != []


async def test_it_is_served(client: httpx.AsyncClient, document: Json) -> None:
    assert (await client.get("/openapi.json")).json() == document


def test_bodies_have_their_schema(document: Json) -> None:
    posts = [(path, operation) for method, path, operation in operations(document) if method == "post"]
    assert len(posts) == sum(route.method == "POST" for route in ROUTES)
    for path, operation in posts:
        content = operation["requestBody"]["content"]
        if form := content.get("multipart/form-data"):
            assert "file" in form["schema"]["properties"], path
            continue
        schema = content["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        assert "properties" in document["components"]["schemas"][name], path


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", "OpenAIError"),
        ("/v1/rerank", "OpenAIError"),
        ("/generate", "NativeError"),
        ("/encode", "NativeError"),
        ("/embed", "TeiError"),
        ("/decode", "TeiError"),
        ("/predict", "TeiError"),
        ("/v1/embed", "CohereError"),
        ("/v2/rerank", "CohereError"),
        ("/score", "OpenAIError"),
        ("/pooling", "OpenAIError"),
        ("/v2/repository/index", "OipError"),
        ("/v2/models/{name}/infer", "OipError"),
        ("/v1/responses", "OpenAIError"),
        ("/chat/completions", "OpenAIError"),
        ("/v1/messages", "AnthropicError"),
        ("/v1/messages/count_tokens", "AnthropicError"),
        ("/api/chat", "OllamaError"),
        ("/completion", "LlamaCppError"),
        ("/apply-template", "LlamaCppError"),
    ],
)
def test_errors_have_the_format_of_their_api(document: Json, path: str, error: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    schemas = {
        response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for status, response in responses.items()
        if status != "200"
    }
    assert schemas == {error}
    assert "Retry-After" in responses["429"]["headers"]


@pytest.mark.parametrize(
    ("path", "event", "whole"),
    [
        ("/v1/chat/completions", "ChatCompletionChunk", "ChatCompletion"),
        ("/v1/completions", "TextCompletion", "TextCompletion"),
        ("/generate", "GenerateEvent", "GenerateResponse"),
        ("/v2/models/{name}/generate_stream", "OipGenerateEvent", None),
        ("/v1/responses", "ResponseEvent", "ResponseObject"),
        ("/v1/messages", "AnthropicEvent", "AnthropicResponse"),
        ("/api/chat", "OllamaChatResponse", "OllamaChatResponse"),
    ],
)
def test_streams_are_described(document: Json, path: str, event: str, whole: str | None) -> None:
    content = dict(document["paths"][path]["post"]["responses"]["200"]["content"])
    stream = content.pop("application/x-ndjson" if path.startswith("/api/") else "text/event-stream")["schema"]
    if "properties" in stream:  # the data of an event is text, which is JSON, or the mark of the end
        data = stream["properties"]["data"]
        if path.startswith("/v1/c"):
            assert data["anyOf"][0] == {"const": "[DONE]"}
            data = data["anyOf"][1]
        assert (stream["required"], data["contentMediaType"]) == (["data"], "application/json")
        stream, error = data["contentSchema"]["anyOf"]
        responses = document["paths"][path]["post"]["responses"]
        assert path == "/v1/responses" or error == responses["400"]["content"]["application/json"]["schema"]
    schemas = {"stream": stream} | {kind: each["schema"] for kind, each in content.items()}
    names = {kind: schema["$ref"].rpartition("/")[2] for kind, schema in schemas.items()}
    assert names == {"stream": event, **({"application/json": whole} if whole else {})}


@pytest.mark.full
def test_keys_are_described_where_they_are_needed(build: Callable[..., Any]) -> None:
    assert "securitySchemes" not in build().openapi()["components"]
    document = build(api_keys=("one",)).openapi()
    assert document["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"
    assert invalid(document) == incomplete(document) == []
    public = {(method, path) for method, path, operation in operations(document) if "security" not in operation}
    assert public == {("get", path) for path in (*PUBLIC, "/")}
    assert all(
        operation.get("security", [{"ApiKey": []}]) == [{"ApiKey": []}] for *_, operation in operations(document)
    )


def test_every_path_has_the_error_format_of_its_dialect() -> None:
    """A path with a name in it is known by its first part, so all of these have the format of the first router."""
    for dialect in DIALECTS:
        for route in dialect.routes:
            path = route.path_format.format(name="other", version="1", task="fill-mask")
            assert error_format(path) is dialect.errors, path


def test_unknown_paths_have_the_error_format_of_their_first_part() -> None:
    formats = [error_format(path).model.__name__ for path in ("/v1/other", "/api/pull", "/chat/other", "/other")]
    assert formats == ["OpenAIError", "OllamaError", "OpenAIError", "NativeError"]


async def test_responses_match_their_models(
    client: httpx.AsyncClient, service: ScriptedService, metrics: CountingMetrics, document: Json
) -> None:
    """What the routes return is what the document says; the models are not used to build it."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    requests = [
        ("get", "/healthz", None), ("get", "/readyz", None), ("get", "/info", None), ("get", "/info/steps", None),
        ("get", "/v1/loads", None),
        ("get", "/v1/models", None), ("get", "/v2", None), ("get", "/v2/health/ready", None),
        ("post", "/v1/chat/completions", chat), ("post", "/v1/completions", {"prompt": "a"}),
        ("post", "/generate", {"prompt": "a"}), ("post", "/tokenize", {"prompt": "a"}),
        ("post", "/detokenize", {"token_ids": [97]}), ("post", "/generate", {}), ("post", "/v1/completions", {}),
        ("post", "/v1/embeddings", {"input": "a"}), ("post", "/predict", {"inputs": "a"}),
        ("post", "/chat/completions", chat), ("get", "/models", None), ("post", "/embeddings", {"input": "a"}),
        ("post", "/v1/responses", {"input": "a"}), ("post", "/responses", {"input": "a", "store": True}),
        ("post", "/v1/messages", chat | {"max_tokens": 5}), ("post", "/v1/messages", chat),
        ("post", "/v1/messages/count_tokens", chat), ("post", "/api/chat", chat | {"model": "demo", "stream": False}),
        ("post", "/api/generate", {"model": "demo", "prompt": "a", "stream": False}),
        ("post", "/api/embed", {"model": "demo", "input": "a"}), ("get", "/api/tags", None), ("get", "/api/ps", None),
        ("post", "/api/embeddings", {"model": "demo", "prompt": "a"}), ("get", "/api/version", None),
        ("post", "/api/show", {"model": "demo"}), ("post", "/api/show", {"model": "other"}),
        ("post", "/completion", {"prompt": "a"}), ("post", "/completions", {"prompt": ["a", [97]]}),
        ("post", "/completion", {"prompt": []}), ("get", "/props", None), ("get", "/slots", None),
        ("post", "/apply-template", chat), ("get", "/health", None), ("get", "/ping", None), ("get", "/version", None),
        ("post", "/tokenize", {"content": "ab", "with_pieces": True}), ("post", "/detokenize", {"tokens": [97]}),
        ("get", "/tokenizer_info", None), ("post", "/v1/responses/input_tokens", {"input": "a"}),
        ("post", "/v1/chat/completions/input_tokens", chat), ("post", "/chat/completions/input_tokens", {}),
    ]  # fmt: skip
    for method, path, body in requests:
        response = await client.request(method, path, json=body)
        described = document["paths"][path][method]["responses"][str(response.status_code)]
        schema = {**described["content"]["application/json"]["schema"], "components": document["components"]}
        errors = [error.message for error in OAS31Validator(schema).iter_errors(response.json())]
        assert errors == [], (path, response.text)
