"""All routers of the API, and what is derived from them: public paths, error formats, traced routes, the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter
from starlette.types import Scope

from app.api import health, invocations, load_report, native, tei, tokenizer
from app.api.anthropic import routes as anthropic
from app.api.encoders import cohere, rerank, vllm
from app.api.encoders import routes as encoders
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.json_size import PromptScanner
from app.api.llama_cpp import completion as llama_cpp
from app.api.llama_cpp import server as llama_cpp_server
from app.api.oip import generate, repository
from app.api.oip import routes as oip
from app.api.ollama import routes as ollama
from app.api.openai import adapters
from app.api.openai import routes as openai
from app.api.openai_responses import routes as openai_responses
from app.api.pages import web_page
from app.api.routing import SCHEMA_REF, ApiRuntime, DialectRoute, DialectRouter, route_methods
from app.errors import RequestError
from app.metrics.instruments import Api
from app.service.prompt import prompt_too_long
from app.service.served_model import ServedDecoder
from app.tracing.request_trace import RequestSpan, Tracer

# Clients of servers that have OpenAI's routes without a prefix send the same bodies there.
_WITHOUT_PREFIX = {
    f"/v1/{path}": f"/{path}"
    for path in (
        "chat/completions",
        "chat/completions/input_tokens",
        "responses",
        "responses/input_tokens",
        "embeddings",
        "models",
        "models/{name:path}",
        "classify",
        "score",
    )
}
ROUTERS: tuple[DialectRouter, ...] = (
    health.probes,
    health.router,
    web_page.router,
    openai.router,
    openai.router.copy(_WITHOUT_PREFIX),
    load_report.router,
    adapters.router,
    openai_responses.router,
    openai_responses.router.copy(_WITHOUT_PREFIX),
    anthropic.router,
    ollama.router,
    llama_cpp_server.probes,
    llama_cpp_server.router,
    llama_cpp.router,
    llama_cpp.router.copy({"/completion": "/completions"}),
    native.router,
    tokenizer.router,
    encoders.openai_router,
    encoders.openai_router.copy(_WITHOUT_PREFIX),
    encoders.native_router,
    vllm.router,
    vllm.router.copy(_WITHOUT_PREFIX),
    invocations.router,
    rerank.openai_router,
    tei.router,
    tei.root_router,
    rerank.tei_router,
    oip.probes,
    repository.router,
    generate.router,
    oip.router,
    cohere.router,
    rerank.cohere_router,
)
ROUTES: tuple[DialectRoute, ...] = tuple(route for router in ROUTERS for route in router.operations)
_MESSAGES = ("messages[].content", "messages[].content[].text")
_INPUT = ("input", "input[].content", "input[].content[].text")
# Where the bodies of generating routes have prompts, and the API that a refusal is counted for.
_PROMPTS: Mapping[str, tuple[Api, tuple[str, ...]]] = {
    "/generate": ("native", ("prompt",)),
    "/v1/completions": ("completions", ("prompt", "prompt[]")),
    "/v1/chat/completions": ("chat", _MESSAGES),
    "/chat/completions": ("chat", _MESSAGES),
    "/v1/messages": ("messages", _MESSAGES),
    "/v1/responses": ("responses", _INPUT),
    "/responses": ("responses", _INPUT),
    "/api/chat": ("ollama", _MESSAGES),
    "/api/generate": ("ollama", ("prompt",)),
    "/completion": ("llama_cpp", ("prompt", "prompt[]")),
    "/completions": ("llama_cpp", ("prompt", "prompt[]")),
}
# A prompt that certainly has more tokens than this, and than the context, is refused while it arrives, also if it might
# be truncated.
MAX_PROMPT_TOKENS = 2**18
# Operations whose requests are traced, with `gen_ai.operation.name`: where OpenTelemetry has no name, ours; empty where
# the body decides.
_TRACED: Mapping[Callable[..., Any], str] = {
    openai.chat_completions: "chat",
    openai_responses.responses: "chat",
    anthropic.messages: "chat",
    ollama.chat: "chat",
    openai.completions: "text_completion",
    ollama.generate: "text_completion",
    llama_cpp.completion: "text_completion",
    llama_cpp.infill: "text_completion",
    native.generate: "text_completion",
    generate.generate: "text_completion",
    generate.generate_stream: "text_completion",
    encoders.embeddings: "embeddings",
    encoders.encode: "embeddings",
    ollama.embed: "embeddings",
    ollama.embeddings: "embeddings",
    cohere.embed: "embeddings",
    cohere.embed_v2: "embeddings",
    tei.embed: "embeddings",
    tei.embed_all: "embeddings",
    tei.embed_or_predict: "",
    vllm.pooling: "embeddings",
    rerank.rerank: "rerank",
    rerank.rerank_without_prefix: "rerank",
    vllm.score: "score",
    tei.similarity: "score",
    encoders.classify: "classify",
    tei.predict: "classify",
    oip.infer: "infer",
    invocations.invocations: "",
}
OTHER = "other"  # method and route of a request that no route answers
# In the OpenAPI document only: `RequestGate` checks the keys, before it reads the body.
API_KEY = HTTPBearer(scheme_name="ApiKey", description="One of the server's API keys.", auto_error=False)


def public_operations() -> frozenset[tuple[str, str]]:
    """Return method and path of the operations that need no API key. Probes, scrapers and a browser's address bar have none."""
    return frozenset(
        (method, route.path)
        for router in ROUTERS
        if router.public
        for route in router.operations
        for method in route_methods(route)
    )


def error_format(path: str) -> ErrorFormat:
    """Return the error format of the path's dialect.

    Of an unknown path, it is the format of the first router that has the path's first part, or else the native one.
    """
    formats = _error_formats()
    return formats.get(path) or formats.get(_first_part(path), NATIVE_ERRORS)


@cache
def _error_formats() -> Mapping[str, ErrorFormat]:
    formats: dict[str, ErrorFormat] = {}
    for router in ROUTERS:
        for route in router.operations:
            formats.setdefault(_first_part(route.path), router.errors)
            formats.setdefault(route.path, router.errors)
    return formats


def _first_part(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""


def span_starter(tracer: Tracer) -> Callable[[Scope], RequestSpan | None]:
    """Return a function that begins the span of a request, or returns None if its route is not traced."""
    traced = [route for route in ROUTES if route.operation in _TRACED]
    exact = {route.path: (route.path, _TRACED[route.operation]) for route in traced if not route.param_convertors}
    patterns = [route for route in traced if route.param_convertors]

    def begin(scope: Scope) -> RequestSpan | None:
        if scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if (found := exact.get(path)) is not None:
            return tracer.begin(scope, *found)
        matching = (route for route in patterns if route.path_regex.match(path))
        route = next(matching, None)
        return None if route is None else tracer.begin(scope, route.path, _TRACED[route.operation])

    return begin


def response_counter() -> Callable[[Scope, int, str], None]:
    """Return a function that counts a response with its status and the code of its error, empty if there is none.

    Labels are method and path of a route, since clients choose what they send: all other requests are of `other`.
    """
    operations = [(method, route) for route in ROUTES for method in route_methods(route)]
    exact = {(method, route.path): route.path_format for method, route in operations if not route.param_convertors}
    patterns = [(method, route) for method, route in operations if route.param_convertors]

    def count(scope: Scope, status: int, code: str) -> None:
        method, path = scope["method"], scope["path"]
        found = exact.get((method, path)) or next(
            (route.path_format for known, route in patterns if known == method and route.path_regex.match(path)), None
        )
        runtime: ApiRuntime = scope["app"].state.runtime
        runtime.metrics.responded(method if found else OTHER, found or OTHER, status, code)

    return count


async def check_arriving_body(scope: Scope) -> Callable[[bytearray], RequestError | None] | None:
    """Return the check of a body while it arrives: of a route that generates, for prompts that are too long."""
    runtime: ApiRuntime = scope["app"].state.runtime
    api, paths = _PROMPTS.get(scope["path"], (None, ()))
    if api is None or not runtime.service.ready or not isinstance(model := runtime.service.model, ServedDecoder):
        return None
    # The first count reads the vocabulary.
    await asyncio.get_running_loop().run_in_executor(None, model.tokenizer.new_count)
    context = model.limits.max_model_len
    scanner = PromptScanner(paths, model.tokenizer.new_count, max(MAX_PROMPT_TOKENS, context))
    field = paths[0].partition("[")[0]

    def check(body: bytearray) -> RequestError | None:
        if (least := scanner.feed(body)) is None:
            return None
        runtime.metrics.refused(api, "invalid")
        return prompt_too_long(context, field, least)

    return check


def describe(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document of all operations. With `needs_key`, those that are not public need an API key.

    FastAPI adds the schemas of request and response bodies. Those of errors and of stream events are added here:
    their responses refer to them by name.
    """
    routes = [
        route.documented([Depends(API_KEY)] if needs_key and not router.public else [])
        for router in ROUTERS
        for route in router.operations
    ]
    document = get_openapi(title=app.title, version=app.version, routes=routes)
    models = {model for router in ROUTERS for model in (router.errors.model, *router.event_models)}
    adapters: list[tuple[Any, Literal["serialization"], TypeAdapter[Any]]] = [
        (model, "serialization", TypeAdapter(model)) for model in sorted(models, key=lambda model: model.__name__)
    ]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=SCHEMA_REF)
    document["components"]["schemas"].update(definitions["$defs"])
    return document
