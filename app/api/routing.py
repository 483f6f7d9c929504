"""Routes of the API dialects: each is declared once, with its path, body, responses, errors, labels and function.

A dialect's functions are translations. The handler of a kind of route (`generates`, `encodes`, `get`, `post`) does what
all of them share: it parses the body, checks the model, counts refusals, asks the service, and writes the response.
Error formats, public paths, labels, checks of prompts and the OpenAPI document are derived from the declarations.

There is one router, `RouteTable`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import UnionType
from typing import Any, Generic, Literal, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from app.api.access import NO_RULES, AccessRules, ApiKeys, ClientLimiter
from app.api.bodies import ArrivingBody, NamedBody
from app.api.errors import NATIVE_ERRORS, ErrorFormat
from app.api.forms import is_form, read_form
from app.api.schemas import LOOP_BYTES, Body, NewNames, parse_body
from app.api.streaming import NDJSON, EarlyStream, EventEncoding, Generation, merge_streams, respond, server_timing
from app.errors import (
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    RequestError,
    UnsupportedParameter,
    WrongModelKind,
)
from app.metrics.instruments import Api, Metrics, refusal_of
from app.service.requests import CLIENT_REQUEST, DirectOutput, Encoded, EncodingRequest
from app.service.served_model import ServedDecoder, ServedTasks
from app.service.service import Service
from app.tracing.request_trace import Tracer

log = logging.getLogger(__name__)

T = TypeVar("T")
# In the state of a request: its body, which is released once it is parsed.
ARRIVED_BODY = "arrived_body"
ENTERED_MODEL = "entered_model"  # the one of several models that it holds
_MAX_NAMES = 4  # served names in one message
_MAX_MODELS = 32  # the same of several models
_SPACE_BYTES = 64  # looked at first: stripping a whole body takes milliseconds
ANSWERING_ERRORS = (RequestError, HTTPException)  # which are raised instead of an answer
OTHER = "other"  # method and route of a request that no route answers


class Lifespan(Protocol):
    """Start and stop of the server's background work: the service's event loop and the worker thread."""

    async def start(self) -> None:
        """Start; called once when the server begins to listen."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of the served model besides its first.

    `accepts_any`: bodies may have any name; `accepts_any_path`: paths too, which say what exists.
    """

    aliases: tuple[str, ...] = ()
    accepts_any: bool = False
    accepts_any_path: bool = False


Task = Literal["generate", "encode", "embed", "classify", "rerank", "infer"]
ModelState = Literal["unloaded", "loading", "ready", "failed", "unloading"]


class ServedEntry(Protocol):
    """One of several models. Its runtime changes with each load."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> Sequence[str]:
        """Names that requests may give, adapters included."""

    @property
    def tasks(self) -> Collection[Task | str]: ...  # also in Hugging Face's words; empty while they are unknown

    @property
    def kind(self) -> str:
        """The kind of the model; empty while it is unknown."""

    @property
    def max_model_len(self) -> int:
        """0 while it is unknown."""

    @property
    def state(self) -> ModelState: ...

    @property
    def stage(self) -> str:
        """The stage of loading, or why loading has failed, in words for people."""

    @property
    def runtime(self) -> ApiRuntime: ...

    @property
    def num_open(self) -> int:
        """Number of requests that hold the model."""

    @property
    def expires_at(self) -> float | None:
        """When the model is unloaded without a request, in Unix seconds; None: never."""


class Models(Protocol):
    """Several models behind one address. Everything runs on the event loop."""

    @property
    def entries(self) -> Sequence[ServedEntry]: ...

    @property
    def is_healthy(self) -> bool:
        """False when only a restart of the process helps."""

    @property
    def ready(self) -> bool:
        """True when each model that is loaded at the start is ready or has failed, and one can serve."""

    @property
    def may_control(self) -> bool:
        """True if clients may load and unload models."""

    def find(self, name: str) -> ServedEntry | None: ...

    async def enter(self, entry: ServedEntry) -> None:
        """Wait until the model is ready, and keep it loaded until `leave`.

        Raises `NotReady` if it cannot be loaded, or not in time.
        """

    def leave(self, entry: ServedEntry) -> None: ...

    async def load(self, entry: ServedEntry) -> None:
        """Load a model and return when it is ready. Raises `NotReady`."""

    async def unload(self, entry: ServedEntry) -> None:
        """Unload a model once its open requests have ended."""

    def keep_alive(self, entry: ServedEntry, seconds: float | None) -> None:
        """Unload the model after as long a time without a request; None: never."""

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition of all models, each sample with the label `model`."""


class MainProcess(Protocol):
    """The server's main process, as an API process beside it sees it. It can answer every request."""

    async def is_needed_for(self, call: ApiCall) -> bool:
        """Return True if this process cannot answer the request."""

    async def answer(self, call: ApiCall, send: Send) -> None:
        """Let the main process answer the request. Raises what it raises."""


async def _nothing() -> None: ...


class PermittedModels:
    """The models that a key may use, for its requests; everything else is as with all models."""

    def __init__(self, models: Models, names: frozenset[str]) -> None:
        self._models, self._names = models, names

    @property
    def entries(self) -> Sequence[ServedEntry]:
        return [entry for entry in self._models.entries if entry.name in self._names]

    def find(self, name: str) -> ServedEntry | None:
        """Return the model of a name. Raises `PermissionDenied`."""
        if (entry := self._models.find(name)) is not None and entry.name not in self._names:
            raise PermissionDenied(f"The request's API key may not use the model {name[:100]!r}.", field="model")
        return entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._models, name)


@dataclass(frozen=True, slots=True)
class ApiRuntime:
    """Everything that the endpoints use.

    `info` returns the part of `/info` that is not the version, stage or capacity; it is called for each request. With
    `page`, the web page is served. `tracer` None: no request is traced. `capacity` returns tokens per second by phase
    and rows, empty while unknown. `main` None: this is the main process, and `collect_metrics` waits for a short time for
    what others have counted.
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
    models: Models | None = None  # None: one model, which stays loaded
    main: MainProcess | None = None
    collect_metrics: Callable[[], Awaitable[None]] = _nothing
    limiter: ClientLimiter | None = None  # None: one of this process, by the access rules

    def report_ignored(self, api: Api, names: Collection[str]) -> None:
        """Count the ignored fields of a body, and log each name the first time. Any thread may call it."""
        self.metrics.fields_ignored(api, len(names))
        for name in self.new_names.find(api, names):
            log.info("requests of the API %s have %r, which has no effect here: it is ignored", api, name)


def new_id() -> str:
    """Return an id that is unique, and no secret: the operating system's generator would take longer."""
    return f"{random.getrandbits(128):032x}"


def new_response_id(prefix: str) -> str:
    """Return a new id for a response body, and note it in the request's trace."""
    identity = f"{prefix}{new_id()}"
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
        name, bracket, place = (error.field or "").partition("[")
        if name in names:
            error.message = error.message.replace(name, names[name])
            error.field = names[name] + bracket + place
        raise


def check_model(runtime: ApiRuntime, name: str | None, *, in_path: bool = False) -> str:
    """Return the name that answers have: the served model's first one, or the adapter's if `name` is an adapter's.

    None and names of the model itself are the model. `in_path`: the name is not in a body. Raises `ModelNotFound`.
    """
    if name is not None and runtime.models is not None:
        known_model(runtime.models, name)  # a wrong name is refused while no model is loaded too
    served, names = runtime.service.model.name, runtime.names
    if name is None or name == served or name in names.aliases:
        return served
    if runtime.service.adapters.find(name) is not None:
        return name
    if names.accepts_any_path if in_path else names.accepts_any:
        for new in runtime.new_names.find("model", (name,)):
            log.info("requests name the model %r, which is not served here: %r answers them", new, served)
        return served
    raise ModelNotFound(f"The model {name[:100]!r} is not served here; {_known_names(runtime)}.", field="model")


def controlled_models(call: ApiCall) -> Models:
    """Return the models that a client may load and unload. Raises `UnsupportedParameter` if it may not."""
    models = call.runtime.models
    if models is None:
        raise UnsupportedParameter(
            "Models are not loaded or unloaded: this server has one model until it ends. Several are served with"
            " `armature serve --model NAME=MODEL --model NAME=MODEL`."
        )
    if not models.may_control:
        raise UnsupportedParameter(
            "Clients of this server may not load or unload models. Its operator can allow it with --model-control on."
        )
    return models


def known_model(models: Models, name: str) -> ServedEntry:
    """Return the model of a name. Raises `ModelNotFound`."""
    if (entry := models.find(name)) is None:
        raise ModelNotFound(f"The model {name[:100]!r} is not served here; {_models_names(models)}.", field="model")
    return entry


def _known_names(runtime: ApiRuntime) -> str:
    if runtime.models is not None:
        return _models_names(runtime.models)
    return f"{', '.join(map(repr, served_names(runtime)[:_MAX_NAMES]))} is"


def _models_names(models: Models) -> str:
    names = [repr(entry.name) for entry in models.entries[:_MAX_MODELS]]
    return f"{', '.join(names)} are" if len(names) > 1 else f"{names[0]} is"


def served_names(runtime: ApiRuntime) -> list[str]:
    """Return the names that requests may give as the model, adapters included."""
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


# ---- a request and its response --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A JSON response with another status than 200, or with headers."""

    body: T
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoding(Generic[T]):
    """What a body was translated to: a request, and a function that writes the result as JSON, a `T`."""

    request: EncodingRequest
    write: Callable[[Encoded], Awaitable[bytes]]
    headers: Callable[[Encoded], Mapping[str, str]] = lambda encoded: {}


class ApiCall:
    """One request to a route, and what its function needs. The body is parsed after the checks that do not need it."""

    __slots__ = ("request", "route", "runtime")

    def __init__(self, route: Route, request: Request) -> None:
        self.route, self.request = route, request
        self.runtime: ApiRuntime = request.app.state.runtime

    @property
    def service(self) -> Service:
        return self.runtime.service

    @property
    def id(self) -> str:
        """The request id that the gate has assigned (`x-request-id`)."""
        identity: str = self.request.scope["state"]["request_id"]
        return identity

    async def forward(self, route: Route) -> Response:
        call = ApiCall(route, self.request)
        if call.runtime.models is not None:
            await call.choose_model(call.runtime.models, None)
        return await route.respond(call)

    async def choose_model(self, models: Models, early: EarlyStream | None) -> None:
        """Let the model that the request names serve it, or else the first one that can; `leave_model` must follow.

        The name is in the path, in the query, or in the body. A wrong one is left to the route, which refuses it.
        `early` tells a client that wants a stream how far loading is.
        """
        permitted: frozenset[str] | None = self.request.scope["state"].get("models")
        seen = models if permitted is None else cast(Models, PermittedModels(models, permitted))
        name = self.request.path_params.get("name") or self.request.query_params.get("model")
        is_read = self.request.method == "POST" and (name is None or early is not None)
        body = await self._named_in_body() if is_read else NamedBody()
        name = name or body.model_name()
        found = None if name is None else seen.find(name)
        entry = found or self.default_model(seen, name)
        self.leave_model(models)
        if self.route.loads and (name is None or found is not None):  # a wrong name loads nothing
            streams = self.route.always_streams if body.stream is None else body.stream
            is_told = early is not None and streams and entry.state != "ready"
            async with early.waiting(lambda: entry.stage) if early is not None and is_told else nullcontext():
                await models.enter(entry)
                self.request.scope["state"][ENTERED_MODEL] = entry
            if (client_request := CLIENT_REQUEST.get()) is not None:
                client_request.model = entry.name
        self.runtime = entry.runtime if seen is models else replace(entry.runtime, models=seen)

    def default_model(self, models: Models, name: str | None) -> ServedEntry:
        """Return the first model for the task that has not failed. Raises `WrongModelKind` if none does the path's."""
        entries, pipeline = models.entries, self.request.url.path.partition("/pipeline/")[2]
        task = pipeline or self.route.task
        able = [entry for entry in entries if task is None or task in entry.tasks]
        if pipeline and name is None and all(entry.tasks for entry in entries) and not able:
            known = "; ".join(f"{entry.name!r} does {', '.join(sorted(entry.tasks))}" for entry in entries)
            raise WrongModelKind(f"None of the models does {pipeline[:100]!r}: {known}.", "task")
        if pipeline and not able:
            able = [entry for entry in entries if not entry.tasks]  # what they do is not known yet
        if not able and task in ("embed", "rerank", "classify"):
            able = [entry for entry in entries if "encode" in entry.tasks]
        return next((entry for entry in able or entries if entry.state != "failed"), (able or entries)[0])

    def leave_model(self, models: Models) -> None:
        if (entry := self.request.scope["state"].pop(ENTERED_MODEL, None)) is not None:
            models.leave(entry)

    async def named_model(self) -> str | None:
        """Return the name that the request gives its model, in the path, the query or the body; None without one."""
        name = self.request.path_params.get("name") or self.request.query_params.get("model")
        if name is None and self.request.method == "POST":
            name = (await self._named_in_body()).model_name()
        return name

    async def _named_in_body(self) -> NamedBody:
        content, kind = await self.read(), self.request.headers.get("content-type", "")
        try:
            if is_form(kind):
                form = await run_beside_loop(len(content), read_form, kind, content)
                named = next(iter(form.get("model", ())), None)
                return NamedBody(model=None if named is None else named.decode("utf-8", "replace"))
            return await run_beside_loop(len(content), NamedBody.model_validate_json, content)
        except (ValidationError, InvalidRequest):  # the route says what is wrong with the body
            return NamedBody()

    async def read(self) -> bytes | bytearray:
        """Return the body's bytes; none once a large body was parsed."""
        arrived: ArrivingBody | None = self.request.scope["state"].get(ARRIVED_BODY)
        return await self.request.body() if arrived is None else arrived.content

    async def has_field(self, name: str) -> bool:
        """Return True if an object in the body has the field, before the body is parsed.

        It tells the dialects of a route apart. In valid JSON, a string with a colon after it is the name of a field.
        """
        return re.search(rb'"%b"\s*:' % name.encode(), await self.read()) is not None

    async def choose_errors(self) -> None:
        """Let errors have the route's other format, if the body says so."""
        route = self.route
        if route.other_errors and (not route.other_field or await self.has_field(route.other_field)):
            self.request.state.errors = route.other_errors

    async def parse(self) -> Any:
        """Parse the body as JSON.

        The content type must be JSON: a browser lets any web page post other types to this server without a CORS
        preflight. Where the dialect's clients send none, only a browser's request must say so, which has an `Origin`.

        Raises `InvalidRequest` if the content type is not JSON, or the body is empty or does not match.
        """
        self.check_json()
        return await self.translate(self._parse)

    def check_json(self) -> None:
        headers = self.request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_checked = self.route.dialect.needs_type or "origin" in headers
        if is_checked and kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequest("Send the body as JSON with the header `content-type: application/json`.")

    async def translate(self, function: Callable[[bytes | bytearray], T]) -> T:
        """Return the function's result for the body. A large body is translated in a thread, beside the event loop.

        Its memory is free for other bodies then: nothing reads it again.
        """
        body = await self.read()
        if len(body) <= LOOP_BYTES:
            return function(body)
        result = await run_beside_loop(len(body), function, body)
        if (arrived := self.request.scope["state"].get(ARRIVED_BODY)) is not None:
            arrived.release()
        return result

    def _parse(self, body: bytes | bytearray) -> Body:
        if not body[:_SPACE_BYTES].strip() and not body.strip():
            raise InvalidRequest("The body is empty: send a JSON object.")
        assert self.route.body is not None, "the route has a body"
        return parse_body(self.route.body, body, self.report_ignored)

    def report_ignored(self, api: Api, names: Collection[str]) -> None:
        self.runtime.report_ignored(api, names)


# ---- declarations ----------------------------------------------------------------------------------------------------

MESSAGES = ("messages[].content", "messages[].content[].text")  # where a chat has its prompts


@dataclass(frozen=True, eq=False)
class Route:
    """Declaration of one operation at one path.

    Attributes:
        serve: The dialect's function; `respond` is the handler that calls it.
        response: Type of the JSON response, and `event` of the events of a stream, in `encoding`.
        statuses: Errors besides those that the kind of route has.
        other_errors: Format of the errors of bodies with the field `other_field`; of all bodies if that is empty.
        operation: `gen_ai.operation.name` of traces: where OpenTelemetry has no name, ours; empty where the body
            decides. None: requests are not traced.
        prompts: Where the body has prompts; the first field is named in errors.
        field_names: The dialect's names of fields that errors name, by ours.
        parse: Read the body; another function where a body is not JSON alone, or is checked first.
        find_model: Return the name that answers have for the name in a body, or in the path.
        task: What a model must do for it; None: any does.
        loads: It waits until its model is loaded.
        by_task: The function in place of `serve` for a model that does tasks.
        openapi: Further options of FastAPI's path operation, for the OpenAPI document.
    """

    method: str
    path: str
    summary: str
    dialect: Dialect
    serve: Callable[..., Awaitable[Any]]
    respond: Callable[[ApiCall], Awaitable[Response]]
    body: type[Body] | None = None
    response: Any = None
    event: Any = None
    encoding: EventEncoding | None = None
    statuses: tuple[int, ...] = ()
    other_errors: ErrorFormat | None = None
    other_field: str = ""
    api: Api = "native"
    operation: str | None = None
    prompts: tuple[str, ...] = ()
    field_names: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[ApiCall], Awaitable[Any]] = ApiCall.parse
    find_model: Callable[[ApiCall, Any], str] = lambda call, body: check_model(call.runtime, body.model)
    openapi: Mapping[str, Any] = field(default_factory=dict)
    task: Task | str | None = None
    loads: bool = False
    by_task: Callable[[ApiCall, Any, ServedTasks], Awaitable[Response]] | None = None

    @cached_property
    def path_format(self) -> str:
        """The path without its parameters' types, `/v1/models/{name}`."""
        return compile_path(self.path)[1]

    @property
    def computes(self) -> bool:
        """True if a model computes its answer."""
        return self.operation is not None

    @property
    def always_streams(self) -> bool:
        """True if its response is a stream where the body does not say."""
        return self.encoding is not None and (self.response is None or self.encoding.media_type == NDJSON)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that the route answers: HEAD wherever GET is, and uvicorn leaves the body out."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


# Statuses that every operation with a body may return, besides those of all operations.
BODY_ERRORS = (400, 408, 413, 429, 503)
Function = Callable[..., Awaitable[Any]]
Paths = str | tuple[str, ...]


class Dialect:
    """An API dialect: the routes of one tag, with one format of errors.

    `public`: its routes need no API key; probes, scrapers and a browser's address bar have none. `needs_type`: bodies
    must have the content type of JSON.
    """

    def __init__(
        self, tag: str, errors: ErrorFormat = NATIVE_ERRORS, public: bool = False, needs_type: bool = True
    ) -> None:
        self.tag, self.errors, self.public, self.needs_type = tag, errors, public, needs_type
        self.routes: list[Route] = []

    def get(self, paths: Paths, summary: str, **options: Any) -> Callable[[Function], Route]:
        """Declare a route that only reads. Its function gets the call."""
        return self._declare("GET", paths, summary, _answer, options)

    def post(self, paths: Paths, summary: str, **options: Any) -> Callable[[Function], Route]:
        """Declare a route with a body. Its function gets the call, and the parsed body if it has a parameter for it."""
        return self._declare("POST", paths, summary, _answer, options)

    def generates(self, paths: Paths, summary: str, **options: Any) -> Callable[[Function], Route]:
        """Declare a route that generates text. Its function translates call, body and model's name to a `Generation`."""
        return self._declare("POST", paths, summary, _generate, options)

    def encodes(self, paths: Paths, summary: str, **options: Any) -> Callable[[Function], Route]:
        """Declare a route of encoders. Its function translates call, body and served model to an `Encoding`."""
        return self._declare("POST", paths, summary, _encode, options)

    def _declare(
        self, method: str, paths: Paths, summary: str, respond: Callable[[ApiCall], Awaitable[Response]], given: Any
    ) -> Callable[[Function], Route]:
        def declare(serve: Function) -> Route:
            hints = get_type_hints(serve)
            answer, body = hints["return"], hints.get("body")
            options: dict[str, Any] = {"body": body, **_response_types(answer), **given}
            if respond is _answer and body is not None:
                options.setdefault("respond", _answer_body)
            if (model := options["body"]) is not None:
                options.setdefault("api", model.API)
            options.setdefault("statuses", _statuses(method, paths, options["body"], respond))
            options.setdefault("task", "generate" if respond is _generate else _TASKS.get(options.get("operation")))
            options.setdefault("loads", method == "POST")
            routes = [
                Route(method, path, summary, self, serve, **{"respond": respond, **options})
                for path in ((paths,) if isinstance(paths, str) else paths)
            ]
            self.routes += routes
            return routes[0]

        return declare


# What a model must do, by the operation of the route.
_TASKS: Mapping[str | None, Task] = {
    "embeddings": "embed", "classify": "classify", "rerank": "rerank", "score": "rerank", "infer": "infer", "chat": "generate",
}  # fmt: skip


def _response_types(answer: Any) -> dict[str, Any]:
    if get_origin(answer) in (Union, UnionType):  # a generation or an encoding, or a reply without one
        kinds = [each for each in get_args(answer) if get_origin(each) in (Generation, Encoding, Reply)]
        answer = kinds[0] if kinds else answer
    kind, arguments = get_origin(answer), get_args(answer)
    if kind is Generation:
        return {"response": arguments[0], "event": arguments[1]}
    if kind in (Encoding, Reply):
        return {"response": arguments[0]}
    return {} if isinstance(answer, type) and issubclass(answer, Response) else {"response": answer}


def _statuses(method: str, paths: Paths, body: type[Body] | None, respond: Any) -> tuple[int, ...]:
    names_model = "{name" in str(paths) or (body is not None and "model" in body.model_fields)
    statuses: tuple[int, ...] = BODY_ERRORS if method == "POST" else (503,) if names_model else ()
    statuses += (404,) if names_model else ()
    return statuses + ((504,) if respond in (_generate, _encode) else ())


# ---- handlers --------------------------------------------------------------------------------------------------------


async def _answer(call: ApiCall) -> Response:
    return _rendered(await call.route.serve(call))


async def _answer_body(call: ApiCall) -> Response:
    await call.choose_errors()
    with renamed_fields(call.route.field_names):
        body = await call.parse()
        if "model" in type(body).model_fields:
            call.route.find_model(call, body)
        return _rendered(await call.route.serve(call, body))


def _rendered(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, Reply):
        return JSONResponse(answer.body, answer.status, answer.headers)
    return JSONResponse(answer)


async def _generate(call: ApiCall) -> Response:
    route, runtime = call.route, call.runtime
    assert route.encoding is not None, "a generating route has an encoding of its events"
    with renamed_fields(route.field_names):
        with count_refusals(runtime.metrics, route.api):
            body = await route.parse(call)
            name = route.find_model(call, body)
            runtime.service.decoder  # noqa: B018  # another kind of model is refused whatever the body's values are
            generation = await route.serve(call, body, name)
        if not isinstance(generation, Generation):
            return _rendered(generation)
        requests = generation.requests
        for each in requests:
            each.api, each.model, each.request_id = route.api, name, call.id
        if len(requests) == 1:
            direct = DirectOutput()
            return await respond(runtime.service.generate(requests[0], direct), generation, route.encoding, direct)
        stream = merge_streams([runtime.service.generate(each) for each in requests], requests[0].params.n)
        return await respond(stream, generation, route.encoding)


async def _encode(call: ApiCall) -> Response:
    route, runtime = call.route, call.runtime
    await call.choose_errors()
    with renamed_fields(route.field_names):
        with count_refusals(runtime.metrics, route.api):
            model = runtime.service.model
            tasks = model if isinstance(model, ServedTasks) and route.by_task is not None else None
            encoder = None if tasks else runtime.service.encoder  # another kind is refused whatever the body is
            body = await call.parse()
            if "model" in type(body).model_fields:
                route.find_model(call, body)
            if tasks is not None and route.by_task is not None:
                return await route.by_task(call, body, tasks)
            encoding = await route.serve(call, body, encoder)
        if not isinstance(encoding, Encoding):
            return _rendered(encoding)
        encoded = await runtime.service.encode(encoding.request)
        written = await encoding.write(encoded)
    timing = server_timing([encoded.timings], "queue", "encode")
    return Response(written, media_type="application/json", headers={**timing, **encoding.headers(encoded)})


# ---- the table -------------------------------------------------------------------------------------------------------


class RouteTable:
    """ASGI application that calls the route of a request's method and path; the first one counts.

    Exceptions, also for unknown paths and methods, are left to the enclosing `RequestGate`.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Route]] = []
        self._allowed: dict[str, list[str]] = {}
        for route in routes:
            pattern, _, parameters = compile_path(route.path)
            for method in route.methods:
                if parameters:
                    self._patterns.append((method, pattern, route))
                else:
                    self._exact.setdefault((method, route.path), route)
            self._allowed.setdefault(route.path, []).append(route.method)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (route := self._exact.get((method, path))) is None:
            route = self._match(scope)
        call = ApiCall(route, Request(scope, receive))
        main = call.runtime.main
        if main is not None and await main.is_needed_for(call):
            await main.answer(call, send)
            return
        if (models := call.runtime.models) is None:
            response = await route.respond(call)
            await response(scope, receive, send)
            return
        early = None if route.encoding is None else EarlyStream(route.encoding, send)
        try:
            await call.choose_model(models, early)
            response = await route.respond(call)
            await response(scope, receive, send if early is None else early.send)
        except RequestError as error:
            if early is None or not early.has_begun:
                raise
            await early.fail(error)
        finally:
            call.leave_model(models)

    def find(self, method: str, path: str) -> Route | None:
        found = self._exact.get((method, path))
        return found or next(
            (one for known, regex, one in self._patterns if known == method and regex.match(path)), None
        )

    def _match(self, scope: Scope) -> Route:
        """Return the first matching route, and put the path's parameters into the scope."""
        allowed = list(self._allowed.get(scope["path"], ()))
        for method, pattern, route in self._patterns:
            if (found := pattern.match(scope["path"])) is None:
                continue
            if method == scope["method"]:
                scope["path_params"] = found.groupdict()
                return route
            allowed.append(route.method)
        if allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(dict.fromkeys(allowed))})
        raise HTTPException(404)
