"""The ASGI application: all routes of the API, what is derived from them, and the layers around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.access import AccessControl
from app.api.anthropic.routes import ANTHROPIC
from app.api.encoders import routes as encoders
from app.api.encoders.schemas import EmbeddingsResponse, RerankResponse, ScoreResponse
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.llama_cpp import routes as llama_cpp
from app.api.middleware import AskedHeader, RequestGate, RequestObserver
from app.api.native.routes import NATIVE
from app.api.oip import routes as oip
from app.api.oip.schemas import OIP_ERRORS
from app.api.ollama.routes import OLLAMA
from app.api.openai import audio
from app.api.openai import routes as openai
from app.api.openai.schemas import OPENAI_ERRORS, ChatCompletion, ChatCompletionChunk, TextCompletion
from app.api.openai_responses.routes import RESPONSES
from app.api.openapi import describe
from app.api.prompt_scanner import PromptScanner
from app.api.routing import BODY_ERRORS, OTHER, ApiCall, ApiRuntime, Dialect, Route, RouteTable
from app.api.schemas import Body
from app.api.server import load_report
from app.api.server import routes as server
from app.api.server.load_report import ASKED, REPORTED, orca_report
from app.api.server.pages import documentation_response, web_file_response, web_paths
from app.api.tasks import routes as tasks
from app.errors import InvalidRequest, RequestError
from app.service.prompt import prompt_too_long
from app.service.served_model import ServedDecoder
from app.tracing.request_trace import RequestSpan, Tracer

# A prompt that certainly has more tokens than this, and than the context, is refused while it arrives, also if it might
# be truncated.
MAX_PROMPT_TOKENS = 2**18
SAGEMAKER = Dialect("SageMaker", OPENAI_ERRORS)


class InvocationsBody(Body):
    """Body of `POST /invocations`: one of these fields, and the others of the route that takes it."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None


# In the order in which they are looked for: a chat may have other fields' names in its tools.
_INVOKED = {
    "messages": openai.chat_completions,
    "prompt": openai.completions,
    "query": encoders.rerank,
    "input": encoders.embeddings,
    "queries": encoders.score,
    "text_1": encoders.score,
    "data_1": encoders.score,
}


@SAGEMAKER.post(
    "/invocations",
    "SageMaker: a chat, a completion, embeddings, scores or a reranking",
    body=InvocationsBody,
    response=ChatCompletion | TextCompletion | EmbeddingsResponse | ScoreResponse | RerankResponse,
    event=ChatCompletionChunk,
    encoding=openai.EVENTS,
    statuses=(*BODY_ERRORS, 404, 504),
    operation="",
    openapi={
        "response_description": "The response of the route for this body; with `stream`, events that end with `[DONE]`."
    },
)
async def invocations(call: ApiCall) -> Response:
    """Serve a body as on the route of its kind, which its fields tell: a hosting service calls this path alone."""
    for name, route in _INVOKED.items():
        if await call.has_field(name):
            return await call.forward(route)
    raise InvalidRequest(
        "Send messages, prompt, input, query with documents, or queries with documents: they tell what to do.",
        field="messages",
    )


DIALECTS = (
    server.PROBES,
    server.SERVER,
    audio.AUDIO,
    openai.OPENAI,
    load_report.SGLANG,
    RESPONSES,
    ANTHROPIC,
    OLLAMA,
    llama_cpp.PROBES,
    llama_cpp.LLAMA_CPP,
    NATIVE,
    encoders.OPENAI,
    encoders.NATIVE,
    encoders.VLLM,
    SAGEMAKER,
    encoders.TEI,
    tasks.ROOT,
    tasks.HUGGING_FACE,
    tasks.MODELS,
    oip.PROBES,
    oip.OIP,
    encoders.COHERE,
)
ROUTES = tuple(route for dialect in DIALECTS for route in dialect.routes)
PUBLIC = frozenset((method, route.path) for route in ROUTES if route.dialect.public for method in route.methods)
_TABLE = RouteTable(ROUTES)
_ERROR_FORMATS: dict[str, ErrorFormat] = {}


def _first_part(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""


for _route in ROUTES:
    _ERROR_FORMATS.setdefault(_first_part(_route.path), _route.dialect.errors)
    _ERROR_FORMATS.setdefault(_route.path, _route.dialect.errors)


def error_format(path: str) -> ErrorFormat:
    """Return the error format of the path's dialect.

    Of an unknown path, it is the format of the first route that has the path's first part, or else the native one.
    """
    if path.endswith(":predict"):
        return OIP_ERRORS  # not that of OpenAI's /v1/models
    return _ERROR_FORMATS.get(path) or _ERROR_FORMATS.get(_first_part(path), NATIVE_ERRORS)


def span_starter(tracer: Tracer) -> Callable[[Scope], RequestSpan | None]:
    """Return a function that begins the span of a request, or returns None if its route is not traced."""

    def begin(scope: Scope) -> RequestSpan | None:
        route = _TABLE.find(scope["method"], scope["path"])
        return None if route is None or route.operation is None else tracer.begin(scope, route.path, route.operation)

    return begin


def count_response(scope: Scope, status: int, code: str) -> None:
    """Count a response with its status and the code of its error, empty if there is none.

    Labels are method and path of a route, since clients choose what they send: all other requests are of `other`.
    """
    route = _TABLE.find(scope["method"], scope["path"])
    method, path = (OTHER, OTHER) if route is None else (scope["method"], route.path_format)
    runtime: ApiRuntime = scope["app"].state.runtime
    runtime.metrics.responded(method, path, status, code)


async def check_arriving_body(scope: Scope) -> Callable[[bytearray], RequestError | None] | None:
    """Return the check of a body while it arrives: of a route that generates, for prompts that are too long."""
    runtime: ApiRuntime = scope["app"].state.runtime
    route = _TABLE.find(scope["method"], scope["path"])
    if route is None or not route.prompts:
        return None
    if runtime.models is not None:  # which of several models the body names is not known yet
        decoders = [entry for entry in runtime.models.entries if "generate" in entry.tasks]
        if len(decoders) != 1:
            return None
        runtime = decoders[0].runtime
    if not runtime.service.ready or not isinstance(model := runtime.service.model, ServedDecoder):
        return None
    # The first count reads the vocabulary.
    await asyncio.get_running_loop().run_in_executor(None, model.tokenizer.new_count)
    context, api = model.limits.max_model_len, route.api
    scanner = PromptScanner(route.prompts, model.tokenizer.new_count, max(MAX_PROMPT_TOKENS, context))
    field = route.prompts[0].partition("[")[0]

    def check(body: bytearray) -> RequestError | None:
        if (least := scanner.feed(body)) is None:
            return None
        runtime.metrics.refused(api, "invalid")
        return prompt_too_long(context, field, least)

    return check


class Application:
    """The ASGI application. A request passes the gate, the header of load reports and the routes, and no other layer.

    FastAPI's and Starlette's own layers and tasks take a fifth of the event loop's time for a short request.
    """

    def __init__(self, runtime: ApiRuntime) -> None:
        self.state = SimpleNamespace(runtime=runtime)  # starlette's own finds an attribute in ten times as long
        self.openapi = cache(lambda: describe(ROUTES, needs_key=bool(runtime.api_keys)))
        self.access, self.routes = _access(runtime), _routes(self, runtime)
        self._serve, self._lifespan = _serving(self, runtime), Router(lifespan=_lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await (self._serve if scope["type"] == "http" else self._lifespan)(scope, receive, send)


def create_app(runtime: ApiRuntime) -> Application:
    return Application(runtime)


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    runtime: ApiRuntime = app.state.runtime
    await runtime.lifetime.start()
    try:
        yield
    finally:
        await runtime.lifetime.stop()


def _access(runtime: ApiRuntime) -> AccessControl:
    files = web_paths() if runtime.page else {}
    public = PUBLIC | {(method, path) for path in files for method in ("GET", "HEAD")}
    return AccessControl(runtime.access_rules, runtime.api_keys, public, runtime.limiter)


def _routes(app: Application, runtime: ApiRuntime) -> ASGIApp:
    files = web_paths() if runtime.page else {}
    routes = RouteTable([*ROUTES, *_documentation_routes(app), *_file_routes(files)])
    # The main process knows the whole load, and adds the header to what it answers for others.
    if runtime.main is not None:
        return routes
    return AskedHeader(routes, ASKED, REPORTED, lambda asked: orca_report(app.state.runtime, asked))


def _serving(app: Application, runtime: ApiRuntime) -> ASGIApp:
    traced = {} if runtime.tracer is None else {"begin_span": span_starter(runtime.tracer)}
    observer = RequestObserver(count_response, **traced)
    gate = RequestGate(app.routes, app.access, error_format, check_arriving_body, observer)
    if not runtime.access_rules.cors_allow_origins:
        return gate
    # Around the gate: a browser's preflight has no key, and its page reads refusals too.
    return CORSMiddleware(
        gate,
        allow_origins=runtime.access_rules.cors_allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", "server-timing", "traceresponse"),
    )


def _documentation_routes(app: Application) -> list[Route]:
    """Return the routes of the document and of its page, rendered once: that takes ten milliseconds of the event loop."""
    pages = Dialect("Server")
    renderers: dict[str, Callable[[dict[str, Any]], Response]] = {
        "/openapi.json": JSONResponse,
        "/docs": documentation_response,
    }
    for path, render in renderers.items():
        rendered = cache(lambda render=render: render(app.openapi()))

        async def send(call: ApiCall, rendered: Callable[[], Response] = rendered) -> Response:
            return rendered()

        pages.get(path, "")(send)
    return pages.routes


def _file_routes(files: dict[str, str]) -> list[Route]:
    pages = Dialect("Server", public=True)
    for path, name in files.items():

        async def send(call: ApiCall, name: str = name) -> Response:
            return web_file_response(call.request, name)

        pages.get(path, "")(send)
    return pages.routes
