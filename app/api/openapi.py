"""The OpenAPI document, which FastAPI makes of the declared routes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import Body as BodyField
from fastapi import Depends
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter
from starlette.routing import compile_path

from app.api.routing import Route
from app.api.streaming import NDJSON, SSE, format_named_sse
from app.version import VERSION

# In the document only: `RequestGate` checks the keys, before it reads the body.
API_KEY = HTTPBearer(scheme_name="ApiKey", description="One of the server's API keys.", auto_error=False)
SCHEMA_REF = "#/components/schemas/{model}"
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


def describe(routes: Iterable[Route], needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document. With `needs_key`, routes that are not public need an API key.

    FastAPI adds the schemas of request and response bodies. Errors and stream events are added here: their responses
    refer to them by name.
    """
    described = list(routes)
    document = get_openapi(
        title="Armature", version=VERSION, routes=[_path_operation(route, needs_key) for route in described]
    )
    formats = [each for route in described for each in (route.dialect.errors, route.other_errors) if each is not None]
    formats += [route.encoding.errors for route in described if route.encoding is not None]
    models = {each.model for each in formats} | {route.event for route in described if route.event is not None}
    adapters: list[tuple[Any, Literal["serialization"], TypeAdapter[Any]]] = [
        (model, "serialization", TypeAdapter(model)) for model in sorted(models, key=lambda model: model.__name__)
    ]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template=SCHEMA_REF)
    document["components"]["schemas"].update(definitions["$defs"])
    return document


def _path_operation(route: Route, needs_key: bool) -> APIRoute:
    options = dict(route.openapi)
    extra = dict(options.pop("openapi_extra", {}))
    _, path_format, names = compile_path(route.path)
    if names:
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        extra["parameters"] = parameters + extra.get("parameters", [])
    if route.response is not None:
        options.setdefault("response_model", route.response)
    needs_key = needs_key and not route.dialect.public
    return APIRoute(
        route.path,
        _signed(route),
        methods=[route.method],
        tags=[route.dialect.tag],
        summary=route.summary,
        responses={**_failures(route), **_stream(route), **options.pop("responses", {})},
        operation_id=route.method.lower() + re.sub(r"\W+", "_", path_format.replace("}", "")),
        dependencies=[Depends(API_KEY)] if needs_key else [],
        openapi_extra=extra,
        **options,
    )


def _signed(route: Route) -> Any:
    """Return a function with the route's body as its only parameter, as FastAPI reads it."""

    async def operation() -> None:
        """See the summary."""

    fields: list[inspect.Parameter] = []
    if route.body is not None:
        annotation = Annotated[route.body, BodyField()]  # type: ignore[name-defined]
        fields.append(inspect.Parameter("body", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation))
    operation.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    operation.__doc__ = route.serve.__doc__
    return operation


def _reference(model: Any) -> dict[str, str]:
    return {"$ref": SCHEMA_REF.format(model=model.__name__)}


def _failures(route: Route) -> dict[int | str, dict[str, Any]]:
    """Return the error responses in the dialect's format. Some bodies' errors have another one."""
    usual: dict[str, Any] = _reference(route.dialect.errors.model)
    schemas: dict[int | str, dict[str, Any]] = dict.fromkeys((401, 500, "default"), usual)
    if route.dialect.public:
        del schemas[401]
    other = route.other_errors
    schemas |= dict.fromkeys(route.statuses, usual if other is None else {"anyOf": [usual, _reference(other.model)]})
    return {
        status: {**_ERRORS[status], "content": {"application/json": {"schema": schema}}}
        for status, schema in schemas.items()
    }


def _stream(route: Route) -> dict[int | str, dict[str, Any]]:
    """Return the successful response of a route that streams: server-sent events, or lines of JSON.

    The data of an event is a JSON text, or an error that ends the stream, or the last mark.
    """
    encoding = route.encoding
    if encoding is None or route.event is None:
        return {}
    if encoding.media_type == NDJSON:
        return {200: {"content": {NDJSON: {"schema": _reference(route.event)}}}}
    shapes = [_reference(route.event), _reference(route.dialect.errors.model)]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": shapes},
    }
    if encoding.last:
        data = {"anyOf": [{"const": encoding.last.decode().removeprefix("data: ").strip()}, data]}
    is_named = encoding.encode is format_named_sse
    name = {"type": "string"} if is_named else {"const": "message"}  # the name of an event that has none
    fields = {"event": name, "data": data}
    schema = {"type": "object", "required": ["data"], "properties": fields, "additionalProperties": False}
    return {200: {"content": {SSE: {"schema": schema}}}}
