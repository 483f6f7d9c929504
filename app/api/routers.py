"""All routers of the API, and what the server derives from them: public paths, error formats and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter

from app.api import health, invocations, native, tei, tokenizer
from app.api.anthropic import routes as anthropic
from app.api.encoders import cohere, rerank, vllm
from app.api.encoders import routes as encoders
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.llama_cpp import completion as llama_cpp
from app.api.llama_cpp import server as llama_cpp_server
from app.api.oip import generate, repository
from app.api.oip import routes as oip
from app.api.ollama import routes as ollama
from app.api.openai import adapters
from app.api.openai import routes as openai
from app.api.openai_responses import routes as openai_responses
from app.api.routing import SCHEMA_REF, DialectRoute, DialectRouter

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
    openai.router,
    openai.router.copy(_WITHOUT_PREFIX),
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
# In the OpenAPI document only: `RequestGate` checks the keys, before it reads the body.
API_KEY = HTTPBearer(scheme_name="ApiKey", description="One of the server's API keys.", auto_error=False)


def public_paths() -> frozenset[str]:
    """Return the paths that need no API key. Probes and scrapers have none."""
    return frozenset(route.path for router in ROUTERS if router.public for route in router.operations)


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
