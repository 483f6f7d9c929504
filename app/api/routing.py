"""Routers of the API dialects: path operations with their request bodies, responses and errors, as OpenAPI describes them.

FastAPI reads the operations for the OpenAPI document and routes requests to them. It does not solve dependencies at run
time: an operation takes the request, and at most one body, which it parses itself. That is strict and has this server's
own error sentences. `RouteTable` finds operations without FastAPI's router. `Runtime` is what operations share.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from fastapi import APIRouter
from fastapi import Body as BodyField
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.access import NO_RULES, AccessRules, ApiKeys
from app.api.bodies import ArrivingBody
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.json_size import LOOP_BYTES
from app.api.schemas import BodyT, parse_body
from app.errors import InvalidRequest, ModelNotFound, RequestError
from app.metrics.instruments import Api, Metrics, refusal_of
from app.service.request_log import CLIENT_REQUEST
from app.service.served_model import ServedDecoder
from app.service.service import Service
from app.tracing.request_trace import Tracer

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_LOGGED = 256  # names of one kind that get a line in the log
_MAX_LOGGED_CHARACTERS = 100
# In the state of a request: its body, which is released once it is parsed.
ARRIVED_BODY = "arrived_body"
_MAX_NAMES = 4  # served names in one message
_SPACE_BYTES = 64  # looked at first: stripping a whole body takes milliseconds


class Lifespan(Protocol):
    """Start and stop of the server's background work: the service's event loop and the worker thread."""

    async def start(self) -> None:
        """Start; called once when the server begins to listen."""

    async def stop(self) -> None:
        """Stop; called once at shutdown."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of the served model besides its first.

    `accepts_any`: bodies may have any name; `accepts_any_path`: paths too, which say what exists.
    """

    aliases: tuple[str, ...] = ()
    accepts_any: bool = False
    accepts_any_path: bool = False


class NewNames:
    """Names from requests that were seen before: of each kind the first ones only, since clients may invent names.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def find(self, kind: str, names: Collection[str]) -> list[str]:
        """Return those of the names that are new, cut to a bounded length; none once there are too many of the kind."""
        with self._lock:
            seen = self._seen.setdefault(kind, set())
            new = []
            for name in names:
                short = name[:_MAX_LOGGED_CHARACTERS]
                if len(seen) < _MAX_LOGGED and short not in seen:
                    seen.add(short)
                    new.append(short)
            return new


@dataclass(frozen=True, slots=True)
class ApiRuntime:
    """Everything that the endpoints use.

    `info` returns the part of `/info` that is not the version, stage or capacity; it is called for each request.
    `page`: the web page is served. `tracer` None: no request is traced. `capacity` returns tokens per second by phase
    and rows, empty while unknown.
    """

    service: Service
    metrics: Metrics
    lifetime: Lifespan
    info: Callable[[], dict[str, Any]]
    created: int  # start of the process, Unix seconds; OpenAI's model list has this field
    api_keys: ApiKeys | tuple[str, ...] = ()
    access_rules: AccessRules = NO_RULES
    names: ModelNames = ModelNames()
    page: bool = True
    tracer: Tracer | None = None
    capacity: Callable[[], Mapping[str, Mapping[int, float]]] = dict
    new_names: NewNames = field(default_factory=NewNames)

    def report_ignored(self, api: Api, names: Collection[str]) -> None:
        """Count the ignored fields of a body, and log each name the first time. Any thread may call it."""
        self.metrics.fields_ignored(api, len(names))
        for name in self.new_names.find(api, names):
            log.info("requests of the API %s have %r, which has no effect here: it is ignored", api, name)


def runtime_of(request: Request) -> ApiRuntime:
    """Return the runtime of the application that received the request."""
    runtime: ApiRuntime = request.app.state.runtime
    return runtime


def request_id(request: Request) -> str:
    """Return the request id that the gate has assigned (`x-request-id`)."""
    identity: str = request.state.request_id
    return identity


def new_response_id(prefix: str) -> str:
    """Return a new id for a response body, and note it in the request's trace."""
    identity = f"{prefix}{uuid.uuid4().hex}"
    if (client_request := CLIENT_REQUEST.get()) is not None and client_request.trace is not None:
        client_request.trace.attributes["gen_ai.response.id"] = identity
    return identity


@contextmanager
def count_refusals(metrics: Metrics, api: Api) -> Iterator[None]:
    """Count a `RequestError` raised in the block as refused.

    Use it only for errors before the request reaches the service, which counts its own.
    """
    try:
        yield
    except RequestError as error:
        metrics.refused(api, refusal_of(error))
        raise


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let a `RequestError` raised in the block name the fields as the dialect does: `names` maps ours to its own."""
    try:
        yield
    except RequestError as error:
        if error.field is not None and error.field in names:
            error.message = error.message.replace(error.field, names[error.field])
            error.field = names[error.field]
        raise


def check_model(runtime: ApiRuntime, name: str | None, *, in_path: bool = False) -> str:
    """Return the name that answers have: the served model's first one, or the adapter's if `name` is an adapter's.

    None and names of the model itself are the model. `in_path`: the name is not in a body.

    Raises:
        ModelNotFound: Nothing of this name is served.
    """
    served, names = runtime.service.model.name, runtime.names
    if name is None or name == served or name in names.aliases:
        return served
    if runtime.service.adapters.find(name) is not None:
        return name
    if names.accepts_any_path if in_path else names.accepts_any:
        for new in runtime.new_names.find("model", (name,)):
            log.info("requests name the model %r, which is not served here: %r answers them", new, served)
        return served
    known = ", ".join(map(repr, served_names(runtime)[:_MAX_NAMES]))
    raise ModelNotFound(f"The model {name[:100]!r} is not served here; {known} is.", field="model")


def served_names(runtime: ApiRuntime) -> list[str]:
    """Return the names that requests may give as the model: those of the model itself, and its adapters."""
    adapters = [adapter.name for adapter in runtime.service.adapters]
    return list(dict.fromkeys([runtime.service.model.name, *runtime.names.aliases, *adapters]))


async def run_beside_loop(num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a body or of its tensors; in a thread if they have so many bytes that it may take long."""
    if num_bytes <= LOOP_BYTES:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def sampling_defaults(runtime: ApiRuntime) -> Mapping[str, float]:
    """Return the sampling parameters that the served checkpoint prefers."""
    model = runtime.service.model
    return model.sampling_defaults if isinstance(model, ServedDecoder) else {}


Responses = dict[int | str, dict[str, Any]]
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
SCHEMA_REF = "#/components/schemas/{model}"
# Statuses that every operation with a body may return, besides those of all operations.
BODY_ERRORS = (400, 408, 413, 429, 503)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait before a retry.", "schema": {"type": "integer"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid, or the served model is of another kind."},
    401: {"description": "The server has API keys, and the request has none of them."},
    404: {"description": "The model is not served here."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    429: {"description": "The server is overloaded.", "headers": _RETRY_AFTER},
    500: {"description": "The server failed to answer the request."},
    503: {"description": "The model is loading, or the server is stopping.", "headers": _RETRY_AFTER},
    504: {"description": "The request was not answered in time."},
    "default": {"description": "Any other error."},
}


def answer_errors_as(request: Request, errors: ErrorFormat) -> None:
    """Let the errors of this request have another format than its path: its body is of another dialect."""
    request.state.errors = errors


class UnreadBody(Generic[BodyT]):
    """The body of one request. The operation parses it, after the checks that do not need it."""

    def __init__(self, request: Request, model: type[BodyT]) -> None:
        self._request, self._model = request, model

    async def read(self) -> bytes:
        """Return the body's bytes; none once a large body was parsed."""
        arrived: ArrivingBody | None = self._request.scope["state"].get(ARRIVED_BODY)
        return await self._request.body() if arrived is None else arrived.content

    async def has_field(self, name: str) -> bool:
        """Return True if an object in the body has the field, before the body is parsed.

        It tells the dialects of a route apart. In valid JSON, a string with a colon after it is the name of a field.
        """
        return re.search(rb'"%b"\s*:' % name.encode(), await self.read()) is not None

    async def parse(self, needs_type: bool = True) -> BodyT:
        """Parse the body as JSON.

        The content type must be JSON: a browser lets any web page post other types to this server without a CORS
        preflight. With `needs_type` False, only a browser's request must say so, which has an `Origin`.

        Raises:
            InvalidRequest: The content type is not JSON, the body is empty or does not match.
        """
        kind = self._request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_checked = needs_type or "origin" in self._request.headers
        if is_checked and kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequest("Send the body as JSON with the header `content-type: application/json`.")
        return await self.translate(self._parse)

    async def translate(self, function: Callable[[bytes], T]) -> T:
        """Return the function's result for the body. A large body is translated in a thread, beside the event loop.

        Its memory is free for other bodies then: nothing reads it again.
        """
        body = await self.read()
        if len(body) <= LOOP_BYTES:
            return function(body)
        result = await run_beside_loop(len(body), function, body)
        if (arrived := self._request.scope["state"].get(ARRIVED_BODY)) is not None:
            arrived.release()
        return result

    def _parse(self, body: bytes) -> BodyT:
        if not body[:_SPACE_BYTES].strip() and not body.strip():
            raise InvalidRequest("The body is empty: send a JSON object.")
        return parse_body(self._model, body, self.report_ignored)

    def report_ignored(self, api: Api, names: Collection[str]) -> None:
        """Count and log the ignored fields of this body."""
        runtime_of(self._request).report_ignored(api, names)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the body's model, for the OpenAPI document."""
        return handler.generate_schema(get_args(source)[0])


# Annotation of an operation's body.
RequestBody = Annotated[UnreadBody[BodyT], BodyField()]


def request_handler(operation: Callable[..., Awaitable[Response]]) -> Endpoint:
    """Return the operation as a function of the request alone. Its second parameter, if any, is a `RequestBody`."""
    hints = get_type_hints(operation).values()
    model = next((get_args(hint)[0] for hint in hints if get_origin(hint) is UnreadBody), None)

    async def handle(request: Request) -> Response:
        return await (operation(request) if model is None else operation(request, UnreadBody(request, model)))

    return handle


class DialectRoute(APIRoute):
    """Route of one operation, which it calls directly.

    FastAPI's own route would build a validator for each body and response at start. So only `documented` has them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.operation, self.options, self.handler = endpoint, options, request_handler(endpoint)
        super().__init__(path, self.handler, methods=options["methods"], name=endpoint.__name__)

    @property
    def method(self) -> str:
        """HTTP method of the operation."""
        return next(iter(self.methods or ()))

    def get_route_handler(self) -> Endpoint:
        """Return the operation, without FastAPI's parsing and dependencies."""
        return self.handler

    def documented(self, dependencies: Sequence[Depends] = ()) -> APIRoute:
        """Return FastAPI's route of the operation, which describes its parameters, body, responses and security."""
        extra = dict(self.options.get("openapi_extra") or {})
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in self.param_convertors
        ]
        if parameters:
            extra["parameters"] = parameters + extra.get("parameters", [])
        options = {**self.options, "openapi_extra": extra, "dependencies": list(dependencies)}
        return APIRoute(self.path, self.operation, **options)


class DialectRouter(APIRouter):
    """Router of one API dialect. All its operations share a tag and the format of error bodies.

    The operations of a public router need no API key.
    """

    def __init__(self, tag: str, errors: ErrorFormat = NATIVE_ERRORS, public: bool = False) -> None:
        self.errors, self.public = errors, public
        self.event_models: list[type] = []
        super().__init__(
            tags=[tag],
            route_class=DialectRoute,
            redirect_slashes=False,
            responses=self.failures(*(() if public else (401,)), 500, "default"),
            generate_unique_id_function=_operation_id,
        )

    @property
    def operations(self) -> list[DialectRoute]:
        """The router's routes."""
        return [route for route in self.routes if isinstance(route, DialectRoute)]

    def failures(self, *statuses: int | str, also: ErrorFormat | None = None) -> Responses:
        """Return the description of error responses in the dialect's format. Some bodies get the format `also`."""
        schema: dict[str, Any] = _reference(self.errors.model)
        if also is not None:
            schema = {"anyOf": [schema, _reference(also.model)]}
        content = {"application/json": {"schema": schema}}
        return {status: {**_ERRORS[status], "content": content} for status in statuses}

    def event_stream(self, event: type, *, last: str | None = None, named: bool = False) -> Responses:
        """Return the description of a successful response that is a stream of server-sent events.

        Their data is an `event` as JSON, or an error that ends the stream, or `last`. With `named`, events have names.
        """
        self.event_models.append(event)
        shapes = [_reference(event), _reference(self.errors.model)]
        data: dict[str, Any] = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": shapes},
        }
        if last is not None:
            data = {"anyOf": [{"const": last}, data]}
        name = {"type": "string"} if named else {"const": "message"}  # the name of an event that has none
        fields = {"event": name, "data": data}
        schema = {"type": "object", "required": ["data"], "properties": fields, "additionalProperties": False}
        return {200: {"content": {SSE: {"schema": schema}}}}

    def line_stream(self, line: type) -> Responses:
        """Return the description of a successful response that is lines of JSON."""
        self.event_models.append(line)
        return {200: {"content": {NDJSON: {"schema": _reference(line)}}}}

    def copy(self, aliases: Mapping[str, str]) -> DialectRouter:
        """Return a router with the operations of some paths at other paths.

        Args:
            aliases: Other path of each path. Operations of other paths are left out.
        """
        router = DialectRouter(str(self.tags[0]), self.errors, self.public)
        router.event_models = self.event_models
        for route in self.operations:
            if route.path in aliases:
                router.routes.append(DialectRoute(aliases[route.path], route.operation, **route.options))
        return router


def _reference(model: type) -> dict[str, str]:
    return {"$ref": SCHEMA_REF.format(model=model.__name__)}


def _operation_id(route: APIRoute) -> str:
    method = next(iter(route.methods or ()))
    return method.lower() + re.sub(r"\W+", "_", route.path_format.replace("}", ""))


def route_methods(route: DialectRoute) -> tuple[str, ...]:
    """Return the methods that a route answers: HEAD wherever GET is, and uvicorn leaves the body out."""
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


class RouteTable:
    """ASGI application that calls the operations of `routes`, and passes all other requests to `app`.

    Without it, FastAPI's layers and its router take a fifth of the event loop's time for a short text, and an embedding
    server answers a tenth fewer requests. The first route with the path counts, as in
    the router, which still has all routes: it answers the documentation, unknown paths and other methods. Exceptions are
    left to the enclosing `RequestGate`.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[DialectRoute]) -> None:
        self._app = app
        methods = [(method, each) for each in routes for method in route_methods(each)]
        self._exact = {(method, each.path): each.handler for method, each in methods if not each.param_convertors}
        self._patterns = [(method, each.path_regex, each.handler) for method, each in methods if each.param_convertors]
        # The router would name the methods of a path's first route only.
        allowed: dict[str, list[str]] = {}
        for each in routes:
            allowed.setdefault(each.path, []).append(each.method)
        self._allowed = {path: ", ".join(names) for path, names in allowed.items() if len(names) > 1}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the operation of the path, or the wrapped application."""
        endpoint = self._find(scope) if scope["type"] == "http" else None
        if endpoint is None:
            if scope["type"] == "http" and (allowed := self._allowed.get(scope["path"])) is not None:
                raise HTTPException(405, headers={"Allow": allowed})
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> Endpoint | None:
        """Return the endpoint of the path, and put the path's parameters into the scope."""
        endpoint = self._exact.get((scope["method"], scope["path"]))
        if endpoint is not None:
            return endpoint
        for method, pattern, candidate in self._patterns:
            if method == scope["method"] and (found := pattern.match(scope["path"])):
                scope["path_params"] = found.groupdict()
                return candidate
        return None
