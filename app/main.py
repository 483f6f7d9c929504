"""The ASGI application, every URL in one list, and the process that serves it until a signal says stop.

What stands behind it is wired in `startup`.
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

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s of common load balancers, which otherwise reuse a connection just as it closes
BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's own default
# Python hands the interpreter from thread to thread at this interval: the event loop waits no longer for a computing worker.
SWITCH_SECONDS = 0.001
# A model's name may have slashes, so the first that matches counts: versions before models, and each one's own metadata last.
MODEL = "/v2/models/{name:path}"
VERSIONED = MODEL + "/versions/{version}"
SCHEMAS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Url:
    """One route; `body` is what its JSON body looks like."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    body: type[Body] | None = None


URLS = (
    Url("GET", "/healthz", health.healthz, "Alive: 200 while the worker thread lives, else 500"),
    Url("GET", "/readyz", health.readyz, "Ready: 503 with the stage of loading until it is"),
    Url("GET", "/info", health.info, "Version, model, facts, plan with reasons, capacity"),
    Url("GET", "/info/steps", health.steps, "The engine's last steps: when, how long, and why longer than such steps take"),
    Url("GET", "/metrics", health.metrics, "Prometheus text; OpenMetrics on request"),
    Url("POST", "/v1/chat/completions", openai.chat_completions, "OpenAI: a chat's next message", ChatBody),
    Url("POST", "/v1/completions", openai.completions, "OpenAI: a prompt's continuation", CompletionBody),
    Url("GET", "/v1/models", openai.models, "OpenAI: the models served, which is one"),
    Url("GET", "/v1/models/{name:path}", openai.model, "OpenAI: one model"),
    Url("POST", "/generate", native.generate, "Text or token ids in, text and token ids out", GenerateBody),
    Url("POST", "/tokenize", native.tokenize, "A text's or a chat's token ids", TokenizeBody),
    Url("POST", "/detokenize", native.detokenize, "Token ids as text", DetokenizeBody),
    Url("POST", "/v1/embeddings", embeddings.embeddings, "OpenAI: vectors of texts", EmbeddingsBody),
    Url("POST", "/v1/rerank", rerank.rerank, "Documents in order of their relevance to a query", RerankBody),
    Url("POST", "/v1/classify", rerank.classify, "Labels with scores", ClassifyBody),
    Url("POST", "/embed", embeddings.embed, "Vectors of texts or token ids", EmbedBody),
    Url("POST", "/embed_all", tei.embed_all, "text-embeddings-inference: vectors of all tokens", EmbedAllBody),
    Url("POST", "/predict", tei.predict, "text-embeddings-inference: labels with scores", PredictBody),
    Url("POST", "/rerank", tei.rerank, "text-embeddings-inference: texts in order of their relevance", RankBody),
    Url("POST", "/similarity", tei.similarity, "text-embeddings-inference: how alike sentences are", SimilarityBody),
    Url("GET", "/v2", oip.server, "Open Inference Protocol: the server"),
    Url("GET", "/v2/", oip.server, "Open Inference Protocol: the server"),
    Url("GET", "/v2/health/live", oip.live, "Open Inference Protocol: as /healthz"),
    Url("GET", "/v2/health/ready", oip.ready, "Open Inference Protocol: as /readyz"),
    Url("GET", f"{VERSIONED}/ready", oip.model_ready, "The same of a version"),
    Url("GET", f"{VERSIONED}/config", oip.model_config, "The same of a version"),
    Url("POST", f"{VERSIONED}/infer", oip.infer, "The same of a version", InferBody),
    Url("POST", f"{VERSIONED}/generate", oip_generate.generate, "The same of a version", OipGenerateBody),
    Url("POST", f"{VERSIONED}/generate_stream", oip_generate.generate_stream, "The same of a version", OipGenerateBody),
    Url("GET", VERSIONED, oip.model_metadata, "The same of a version"),
    Url("GET", f"{MODEL}/ready", oip.model_ready, "Open Inference Protocol: whether a model is ready"),
    Url("GET", f"{MODEL}/config", oip.model_config, "Open Inference Protocol: a model's tensors as Triton tells them"),
    Url("POST", f"{MODEL}/infer", oip.infer, "Open Inference Protocol: tensors in, tensors out", InferBody),
    Url("POST", f"{MODEL}/generate", oip_generate.generate, "Open Inference Protocol: a text's continuation", OipGenerateBody),
    Url("POST", f"{MODEL}/generate_stream", oip_generate.generate_stream, "The same while it grows", OipGenerateBody),
    Url("GET", MODEL, oip.model_metadata, "Open Inference Protocol: a model and its tensors"),
    Url("GET", "/", web.root, "The page"),
)


def create_app(runtime: Runtime) -> FastAPI:
    """The whole application around what serves it. Its lifespan starts and stops the runtime."""

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
    """Bodies are parsed by the endpoints, faster and stricter than FastAPI would; so it is told what they look like."""
    if body is None:
        return None
    schema = {"$ref": SCHEMAS.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """When somebody asks: no start waits for it."""
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
    """Serves until SIGTERM or Ctrl-C; the exit status. Raises the `StartupError` that kept it from serving."""
    _log_to_stderr(settings.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    prepared = prepare(settings)
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True  # read ten times a second

    serving = Serving(prepared, on_fatal)
    server = uvicorn.Server(server_config(create_app(serving.runtime()), settings))
    # uvicorn raises a signal again once it has drained: that finds this same harmless receiver, and we end by returning.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    listener = listen(settings.host, settings.port)
    sys.stdout.write(f"listening on {url_of(listener)}\n")
    sys.stdout.flush()
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn's way to say that the application's own start or stop has failed
        failures.append(
            ServingFailed("The server could not start its threads; its log says why. Is a limit of processes reached?")
        )
    log.info("stopped")
    for failure in failures:
        raise failure if isinstance(failure, StartupError) else ServingFailed(_lost(failure)) from failure
    if serving.worker.alive:
        # Nothing ends a thread in the midst of native code; the interpreter's own way out would pull the ground from under it.
        logging.shutdown()
        os._exit(0)
    return 0


def _lost(failure: BaseException) -> str:
    return f"The worker has failed, and without it nothing is served: {named(failure)}. The log has its trace."


def listen(host: str, port: int) -> socket.socket:
    """An open port, so that clients and probes find somebody there from the first moment."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsInvalid(f"Cannot listen on {host} port {port}: {error}. Choose others with --host and --port.") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
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
        timeout_graceful_shutdown=cast(int, settings.drain_seconds),  # only ever asyncio's timeout: fractions do
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True)
    # Its own events are told by us, in our words; what strangers send to the port is no event of the process.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
