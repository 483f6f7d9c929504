"""The ASGI application, the list of all routes, and the process that serves them until a stop signal.

`startup` wires the parts that the application calls.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from app.api import embeddings, health, native, oip, oip_generate, openai, rerank, tei, web
from app.api.dependencies import Runtime
from app.api.directory import Directory, Endpoint
from app.api.door import Door
from app.api.encoder_schemas import ClassifyBody, EmbedBody, EmbeddingsBody, RerankBody
from app.api.errors import HANDLED, answer_error
from app.api.head import BoundedHead
from app.api.native_schemas import DetokenizeBody, GenerateBody, TokenizeBody
from app.api.oip_schemas import InferBody, OipGenerateBody
from app.api.openai_schemas import ChatBody, CompletionBody
from app.api.schemas import Body
from app.api.tei_schemas import EmbedAllBody, PredictBody, RankBody, SimilarityBody
from app.errors import ServingFailed, SettingsInvalid, StartupError
from app.preparation import prepare
from app.settings import Settings
from app.startup import Serving
from app.termination import named
from app.version import VERSION

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s of common load balancers, which would otherwise reuse a connection as it closes
BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's default
# Interval at which Python switches threads: the longest wait of the event loop for a busy worker thread.
SWITCH_SECONDS = 0.001
# A model's name may have slashes and the first match counts: so versions precede models, and each one's metadata is
# last.
MODEL = "/v2/models/{name:path}"
VERSIONED = MODEL + "/versions/{version}"
SCHEMAS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Url:
    """One route; `body` is the schema of its JSON body."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    body: type[Body] | None = None


URLS = (
    Url("GET", "/healthz", health.healthz, "Liveness: 200 while the worker thread is alive, else 500"),
    Url("GET", "/readyz", health.readyz, "Readiness: 503 with the loading stage until the server is ready"),
    Url("GET", "/info", health.info, "Version, model, facts, plan with reasons, and capacity"),
    Url("GET", "/info/steps", health.steps, "The last engine steps: time, duration, and the cause of slow ones"),
    Url("GET", "/metrics", health.metrics, "Prometheus text; OpenMetrics on request"),
    Url("POST", "/v1/chat/completions", openai.chat_completions, "OpenAI: chat completion", ChatBody),
    Url("POST", "/v1/completions", openai.completions, "OpenAI: text completion", CompletionBody),
    Url("GET", "/v1/models", openai.models, "OpenAI: list of models, always one"),
    Url("GET", "/v1/models/{name:path}", openai.model, "OpenAI: one model"),
    Url("POST", "/generate", native.generate, "Generate from text or token ids; returns text and token ids", GenerateBody),
    Url("POST", "/tokenize", native.tokenize, "Token ids of a text or a chat", TokenizeBody),
    Url("POST", "/detokenize", native.detokenize, "Text of token ids", DetokenizeBody),
    Url("POST", "/v1/embeddings", embeddings.embeddings, "OpenAI: embeddings of texts", EmbeddingsBody),
    Url("POST", "/v1/rerank", rerank.rerank, "Rank documents by relevance to a query", RerankBody),
    Url("POST", "/v1/classify", rerank.classify, "Classify texts: labels with scores", ClassifyBody),
    Url("POST", "/embed", embeddings.embed, "Embeddings of texts or token ids", EmbedBody),
    Url("POST", "/embed_all", tei.embed_all, "text-embeddings-inference: embeddings of all tokens", EmbedAllBody),
    Url("POST", "/predict", tei.predict, "text-embeddings-inference: labels with scores", PredictBody),
    Url("POST", "/rerank", tei.rerank, "text-embeddings-inference: rank texts by relevance", RankBody),
    Url("POST", "/similarity", tei.similarity, "text-embeddings-inference: sentence similarity", SimilarityBody),
    Url("GET", "/v2", oip.server, "Open Inference Protocol: server metadata"),
    Url("GET", "/v2/", oip.server, "Open Inference Protocol: server metadata"),
    Url("GET", "/v2/health/live", oip.live, "Open Inference Protocol: liveness, as /healthz"),
    Url("GET", "/v2/health/ready", oip.ready, "Open Inference Protocol: readiness, as /readyz"),
    Url("GET", f"{VERSIONED}/ready", oip.model_ready, "Open Inference Protocol: readiness of a model version"),
    Url("GET", f"{VERSIONED}/config", oip.model_config, "Open Inference Protocol: Triton configuration of a model version"),
    Url("POST", f"{VERSIONED}/infer", oip.infer, "Open Inference Protocol: inference with a model version", InferBody),
    Url(
        "POST",
        f"{VERSIONED}/generate",
        oip_generate.generate,
        "Open Inference Protocol: generate with a model version",
        OipGenerateBody,
    ),
    Url(
        "POST",
        f"{VERSIONED}/generate_stream",
        oip_generate.generate_stream,
        "Open Inference Protocol: generate with a model version, streamed",
        OipGenerateBody,
    ),
    Url("GET", VERSIONED, oip.model_metadata, "Open Inference Protocol: metadata of a model version"),
    Url("GET", f"{MODEL}/ready", oip.model_ready, "Open Inference Protocol: readiness of a model"),
    Url("GET", f"{MODEL}/config", oip.model_config, "Open Inference Protocol: Triton configuration of a model"),
    Url("POST", f"{MODEL}/infer", oip.infer, "Open Inference Protocol: inference, tensors in and out", InferBody),
    Url("POST", f"{MODEL}/generate", oip_generate.generate, "Open Inference Protocol: generate", OipGenerateBody),
    Url(
        "POST",
        f"{MODEL}/generate_stream",
        oip_generate.generate_stream,
        "Open Inference Protocol: generate, streamed",
        OipGenerateBody,
    ),
    Url("GET", MODEL, oip.model_metadata, "Open Inference Protocol: metadata of a model and its tensors"),
    Url("GET", "/", web.root, "Redirect to the API documentation"),
)


def create_app(runtime: Runtime) -> FastAPI:
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
        exception_handlers=dict.fromkeys(HANDLED, answer_error),
    )
    app.state.runtime = runtime
    app.add_middleware(Directory, endpoints={(url.method, url.path): url.endpoint for url in URLS if "{" not in url.path})
    app.add_middleware(Door, api_keys=runtime.api_keys)
    for url in URLS:
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
    schema = {"$ref": SCHEMAS.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the body schemas to the OpenAPI document when it is first requested, to keep the start fast."""
    bodies = [(url.body, "validation") for url in URLS if url.body is not None]
    generated = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = generated()
        _, definitions = models_json_schema(bodies, ref_template=SCHEMAS)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]


# ---- the process ---------------------------------------------------------------------------------------------------


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status.

    Raises:
        StartupError: The server could not start.
        ServingFailed: The worker failed while serving.
    """
    _log_to_stderr(settings.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    prepared = prepare(settings)
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True  # uvicorn reads it ten times a second

    serving = Serving(prepared, on_fatal)
    server = uvicorn.Server(server_config(create_app(serving.runtime()), settings))
    # uvicorn raises the signal again after draining. This harmless handler receives it, so that the process ends by
    # returning.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    listener = listen(settings.host, settings.port)
    sys.stdout.write(f"listening on {url_of(listener)}\n")
    sys.stdout.flush()
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn exits so if the application's startup or shutdown has failed
        failures.append(
            ServingFailed("The server could not start its threads; the log says why. Is the limit of processes reached?")
        )
    log.info("stopped")
    for failure in failures:
        raise failure if isinstance(failure, StartupError) else ServingFailed(_lost(failure)) from failure
    if serving.worker.alive:
        # A thread within native code cannot be ended, and finalizing the interpreter would crash it: so exit without
        # finalizing.
        logging.shutdown()
        os._exit(0)
    return 0


def _lost(failure: BaseException) -> str:
    return f"The worker has failed, so no request can be served: {named(failure)}. The log has the traceback."


def listen(host: str, port: int) -> socket.socket:
    """Open the port, so that clients and probes can connect from the first moment.

    Raises:
        SettingsInvalid: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsInvalid(f"Cannot listen on {host} port {port}: {error}. Choose others with --host and --port.") from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket; IPv6 hosts are bracketed."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration: no access log, no WebSockets, bounded request heads."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=BoundedHead,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=cast(int, settings.drain_seconds),  # passed to asyncio's timeout, which accepts fractions
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True)
    # This process logs its events itself. uvicorn would also log malformed requests, which are not events of the
    # server.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
