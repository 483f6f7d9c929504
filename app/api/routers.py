"""All routes of the API, and what is derived from them: public paths, error formats, spans, counts, checks of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from app.api.anthropic.routes import ANTHROPIC
from app.api.encoders import routes as encoders
from app.api.encoders.schemas import EmbeddingsResponse, RerankResponse, ScoreResponse
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.llama_cpp import routes as llama_cpp
from app.api.native.routes import NATIVE
from app.api.oip import routes as oip
from app.api.oip.schemas import OIP_ERRORS
from app.api.ollama.routes import OLLAMA
from app.api.openai import audio
from app.api.openai import routes as openai
from app.api.openai.schemas import OPENAI_ERRORS, ChatCompletion, ChatCompletionChunk, TextCompletion
from app.api.openai_responses.routes import RESPONSES
from app.api.prompt_scanner import PromptScanner
from app.api.routing import BODY_ERRORS, OTHER, ApiCall, ApiRuntime, Dialect, RouteTable
from app.api.schemas import Body
from app.api.server import load_report
from app.api.server import routes as server
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
