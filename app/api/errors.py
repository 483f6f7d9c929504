"""Conversion of exceptions to HTTP responses: the only place with status codes and with each dialect's error body.

All other code raises `RequestError`s, which know no HTTP. The gate (`RequestGate`) converts what no other
handler has caught.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Mapping,
)
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from app.errors import (
    ArmatureError,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    RequestError,
    RequestTimeout,
    ServiceStopping,
    StepFailed,
    Unauthorized,
)

# The nearest base class of an error decides.
STATUS_CODES: Mapping[type[ArmatureError], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    ModelNotFound: 404,
    BodyTooLarge: 413,
    Overloaded: 429,
    StepFailed: 500,
    NotReady: 503,
    ServiceStopping: 503,
    RequestTimeout: 504,
    ArmatureError: 500,
}
# No better estimate is known while loading. The kubelet's default readiness period is 10 s; clients may retry a bit
# sooner.
LOADING_RETRY_SECONDS = 5
# Another pod can serve the request at once.
STOPPING_RETRY_SECONDS = 1
INTERNAL_MESSAGE = "The server failed to answer this request. Its log, under the same x-request-id, says why."


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error in terms of HTTP, before a dialect formats its body."""

    status: int
    code: str
    message: str
    field: str | None
    headers: Mapping[str, str]


def to_http_error(error: Exception) -> HttpError:
    """Convert any exception. An unexpected one becomes a 500 that reveals no internals to the client."""
    if isinstance(error, RequestError):
        status = next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)
        return HttpError(status, error.code, error.message, error.field, _retry_headers(error))
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code, "http_error")
        return HttpError(error.status_code, code, f"{error.detail}.", None, dict(error.headers or {}))
    return HttpError(500, "internal_error", INTERNAL_MESSAGE, None, {})


_HTTP_CODES: Mapping[int, str] = {404: "route_not_found", 405: "method_not_allowed"}


def _retry_headers(error: RequestError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds)))}
    if isinstance(error, NotReady):
        return {"retry-after": str(LOADING_RETRY_SECONDS)}
    if isinstance(error, ServiceStopping):
        return {"retry-after": str(STOPPING_RETRY_SECONDS)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


# ---- error bodies of each dialect ----------------------------------------------------------------------------------


def _openai_body(error: HttpError) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


_OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}


def _native_body(error: HttpError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "field": error.field}}


def _oip_body(error: HttpError) -> dict[str, Any]:
    return {"error": error.message}


def _tei_body(error: HttpError) -> dict[str, Any]:
    kind = _TEI_TYPES.get(error.status, "Backend" if error.status >= 500 else "Validation")
    return {"error": error.message, "error_type": kind}


_TEI_TYPES: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}


# First part of the path → body; all other paths use the native dialect.
ERROR_BODIES: Mapping[str, Callable[[HttpError], dict[str, Any]]] = {
    "v1": _openai_body,
    "v2": _oip_body,
    **dict.fromkeys(("predict", "rerank", "similarity", "embed_all"), _tei_body),
}


def error_body(path: str, error: HttpError) -> dict[str, Any]:
    """Return the error's body in the dialect of the path."""
    return ERROR_BODIES.get(path.split("/", 2)[1] if path.startswith("/") else "", _native_body)(error)


def error_response(path: str, error: Exception) -> JSONResponse:
    """Return the complete response for an exception, in the dialect of the path."""
    http_error = to_http_error(error)
    return JSONResponse(error_body(path, http_error), http_error.status, headers=http_error.headers)


# ---- pydantic's errors ---------------------------------------------------------------------------------------------


def invalid_body(error: ValidationError) -> InvalidRequest:
    """Convert a pydantic error to one sentence about the most specific field at fault.

    The messages of a union's branches about this field are joined by `or`.
    """
    problems = [(_field_name(item["loc"]), item["msg"]) for item in error.errors()]
    name, _ = max(
        problems, key=lambda complaint: (complaint[0].count("[") + complaint[0].count("."), bool(complaint[0]))
    )
    sentence = "; or ".join(dict.fromkeys(_plain_message(text) for about, text in problems if about == name))
    return InvalidRequest(
        f"{name}: {sentence}." if name else f"The body could not be read: {sentence}.", field=name or None
    )


def _field_name(location: tuple[int | str, ...]) -> str:
    """Return a name such as `messages[0].content` for pydantic's location.

    The location also contains the branches of unions (`str`, `list[str]`), which are left out.
    """
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_TAGS and part[0].islower():
            name += f".{part}" if name else part
    return name


_TYPE_TAGS = frozenset({"str", "int", "float", "bool", "none", "dict", "list", "tuple", "body"})


def _plain_message(text: str) -> str:
    return text.removeprefix("Value error, ").removesuffix(".").replace("valid tuple", "valid list")


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Handle the exception types that FastAPI may catch itself."""
    return error_response(request.url.path, error)


HANDLED_EXCEPTIONS: tuple[type[Exception], ...] = (RequestError, HTTPException)
