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
from typing import (
    Any,
    cast,
)

import uvicorn
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
    BoundedHeadProtocol,
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
from app.errors import (
    ServingFailed,
    SettingsInvalid,
    StartupError,
)
from app.server.prepare import prepare
from app.server.startup import ServerRuntime
from app.server.termination_log import describe_exception
from app.settings import Settings
from app.version import VERSION

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = (
    75  # longer than the 60 s of common load balancers, which would otherwise reuse a connection as it closes
)
BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's default
# Interval at which Python switches threads: the longest wait of the event loop for a busy worker thread.
SWITCH_SECONDS = 0.001
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

    serving = ServerRuntime(prepared, on_fatal)
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
            ServingFailed(
                "The server could not start its threads; the log says why. Is the limit of processes reached?"
            )
        )
    log.info("stopped")
    for failure in failures:
        raise (
            failure if isinstance(failure, StartupError) else ServingFailed(_worker_failure_message(failure))
        ) from failure
    if serving.worker.alive:
        # A thread within native code cannot be ended, and finalizing the interpreter would crash it: so exit without
        # finalizing.
        logging.shutdown()
        os._exit(0)
    return 0


def _worker_failure_message(failure: BaseException) -> str:
    return (
        f"The worker has failed, so no request can be served: {describe_exception(failure)}. The log has the traceback."
    )


def listen(host: str, port: int) -> socket.socket:
    """Open the port, so that clients and probes can connect from the first moment.

    Raises:
        SettingsInvalid: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsInvalid(
            f"Cannot listen on {host} port {port}: {error}. Choose others with --host and --port."
        ) from error


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
        http=BoundedHeadProtocol,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=cast(
            int, settings.drain_seconds
        ),  # passed to asyncio's timeout, which accepts fractions
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    # This process logs its events itself. uvicorn would also log malformed requests, which are not events of the
    # server.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
