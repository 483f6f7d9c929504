"""The ASGI application and the list of all routes. `process` serves it, `startup` wires the parts that it calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from app.api import (
    health,
    native,
    tei,
)
from app.api import (
    health as web,
)
from app.api.dependencies import ApiRuntime
from app.api.encoders import (
    routes as embeddings,
)
from app.api.encoders import (
    routes as rerank,
)
from app.api.encoders.schemas import (
    ClassifyBody,
    EmbedBody,
    EmbeddingsBody,
    RerankBody,
)
from app.api.errors import (
    HANDLED_EXCEPTIONS,
    handle_error,
)
from app.api.middleware import (
    Endpoint,
    ExactRoutes,
    RequestGate,
)
from app.api.native import (
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from app.api.oip import (
    generate,
)
from app.api.oip import (
    routes as oip,
)
from app.api.oip.schemas import (
    InferBody,
    OipGenerateBody,
)
from app.api.openai import routes as openai
from app.api.openai.schemas import (
    ChatBody,
    CompletionBody,
)
from app.api.schemas import Body
from app.api.tei import (
    EmbedAllBody,
    PredictBody,
    RankBody,
    SimilarityBody,
)
from app.version import VERSION

# A model's name may have slashes and the first match counts: so versions precede models, and each one's metadata is
# last.
MODEL_PATH = "/v2/models/{name:path}"
VERSION_PATH = MODEL_PATH + "/versions/{version}"
SCHEMA_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """One route; `body` is the schema of its JSON body."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    body: type[Body] | None = None


ROUTES = (
    Route("GET", "/healthz", health.healthz, "Liveness: 200 while the worker thread is alive, else 500"),
    Route("GET", "/readyz", health.readyz, "Readiness: 503 with the loading stage until the server is ready"),
    Route("GET", "/info", health.info, "Version, model, facts, plan with reasons, and capacity"),
    Route("GET", "/info/steps", health.steps, "The last engine steps: time, duration, and the cause of slow ones"),
    Route("GET", "/metrics", health.metrics, "Prometheus text; OpenMetrics on request"),
    Route("POST", "/v1/chat/completions", openai.chat_completions, "OpenAI: chat completion", ChatBody),
    Route("POST", "/v1/completions", openai.completions, "OpenAI: text completion", CompletionBody),
    Route("GET", "/v1/models", openai.models, "OpenAI: list of models, always one"),
    Route("GET", "/v1/models/{name:path}", openai.model, "OpenAI: one model"),
    Route(
        "POST",
        "/generate",
        native.generate,
        "Generate from text or token ids; returns text and token ids",
        GenerateBody,
    ),
    Route("POST", "/tokenize", native.tokenize, "Token ids of a text or a chat", TokenizeBody),
    Route("POST", "/detokenize", native.detokenize, "Text of token ids", DetokenizeBody),
    Route("POST", "/v1/embeddings", embeddings.embeddings, "OpenAI: embeddings of texts", EmbeddingsBody),
    Route("POST", "/v1/rerank", rerank.rerank, "Rank documents by relevance to a query", RerankBody),
    Route("POST", "/v1/classify", rerank.classify, "Classify texts: labels with scores", ClassifyBody),
    Route("POST", "/embed", embeddings.embed, "Embeddings of texts or token ids", EmbedBody),
    Route("POST", "/embed_all", tei.embed_all, "text-embeddings-inference: embeddings of all tokens", EmbedAllBody),
    Route("POST", "/predict", tei.predict, "text-embeddings-inference: labels with scores", PredictBody),
    Route("POST", "/rerank", tei.rerank, "text-embeddings-inference: rank texts by relevance", RankBody),
    Route("POST", "/similarity", tei.similarity, "text-embeddings-inference: sentence similarity", SimilarityBody),
    Route("GET", "/v2", oip.server, "Open Inference Protocol: server metadata"),
    Route("GET", "/v2/", oip.server, "Open Inference Protocol: server metadata"),
    Route("GET", "/v2/health/live", oip.live, "Open Inference Protocol: liveness, as /healthz"),
    Route("GET", "/v2/health/ready", oip.ready, "Open Inference Protocol: readiness, as /readyz"),
    Route("GET", f"{VERSION_PATH}/ready", oip.model_ready, "Open Inference Protocol: readiness of a model version"),
    Route(
        "GET",
        f"{VERSION_PATH}/config",
        oip.model_config,
        "Open Inference Protocol: Triton configuration of a model version",
    ),
    Route(
        "POST", f"{VERSION_PATH}/infer", oip.infer, "Open Inference Protocol: inference with a model version", InferBody
    ),
    Route(
        "POST",
        f"{VERSION_PATH}/generate",
        generate.generate,
        "Open Inference Protocol: generate with a model version",
        OipGenerateBody,
    ),
    Route(
        "POST",
        f"{VERSION_PATH}/generate_stream",
        generate.generate_stream,
        "Open Inference Protocol: generate with a model version, streamed",
        OipGenerateBody,
    ),
    Route("GET", VERSION_PATH, oip.model_metadata, "Open Inference Protocol: metadata of a model version"),
    Route("GET", f"{MODEL_PATH}/ready", oip.model_ready, "Open Inference Protocol: readiness of a model"),
    Route("GET", f"{MODEL_PATH}/config", oip.model_config, "Open Inference Protocol: Triton configuration of a model"),
    Route(
        "POST", f"{MODEL_PATH}/infer", oip.infer, "Open Inference Protocol: inference, tensors in and out", InferBody
    ),
    Route("POST", f"{MODEL_PATH}/generate", generate.generate, "Open Inference Protocol: generate", OipGenerateBody),
    Route(
        "POST",
        f"{MODEL_PATH}/generate_stream",
        generate.generate_stream,
        "Open Inference Protocol: generate, streamed",
        OipGenerateBody,
    ),
    Route("GET", MODEL_PATH, oip.model_metadata, "Open Inference Protocol: metadata of a model and its tensors"),
    Route("GET", "/", web.root, "Redirect to the API documentation"),
)


def create_app(runtime: ApiRuntime) -> FastAPI:
    """Return the ASGI application for a runtime; its lifespan starts and stops the runtime."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await runtime.lifetime.start()
        try:
            yield
        finally:
            await runtime.lifetime.stop()

    app = FastAPI(
        title="Armature",
        version=VERSION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(HANDLED_EXCEPTIONS, handle_error),
    )
    app.state.runtime = runtime
    app.add_middleware(
        ExactRoutes, endpoints={(url.method, url.path): url.endpoint for url in ROUTES if "{" not in url.path}
    )
    app.add_middleware(RequestGate, api_keys=runtime.api_keys)
    for url in ROUTES:
        app.add_api_route(
            url.path, url.endpoint, methods=[url.method], summary=url.summary, openapi_extra=_request_body(url.body)
        )
    _describe_bodies(app)
    return app


def _request_body(body: type[Body] | None) -> dict[str, Any] | None:
    """Return the OpenAPI description of a body, since FastAPI does not see it.

    Endpoints parse their bodies themselves, which is faster and stricter than FastAPI.
    """
    if body is None:
        return None
    schema = {"$ref": SCHEMA_REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the body schemas to the OpenAPI document when it is first requested, to keep the start fast."""
    bodies = [(url.body, "validation") for url in ROUTES if url.body is not None]
    generated = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = generated()
        _, definitions = models_json_schema(bodies, ref_template=SCHEMA_REF)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
