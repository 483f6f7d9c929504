"""Conversion of exceptions to HTTP responses: the only place with status codes, and the native format of error bodies.

All other code raises `RequestError`s, which know no HTTP. The gate (`RequestGate`) converts what no other handler has
caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from app.errors import (
    ArmatureError,
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    PermissionDenied,
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
    PermissionDenied: 403,
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
        seconds = LOADING_RETRY_SECONDS if error.retry_after_seconds is None else math.ceil(error.retry_after_seconds)
        return {"retry-after": str(max(1, seconds))}
    if isinstance(error, ServiceStopping):
        return {"retry-after": str(STOPPING_RETRY_SECONDS)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


# ---- error bodies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Error body of a dialect. `model` describes it in the OpenAPI document."""

    body: Callable[[HttpError], dict[str, Any]]
    model: type

    def response(self, error: Exception) -> JSONResponse:
        http_error = to_http_error(error)
        return JSONResponse(self.body(http_error), http_error.status, headers=http_error.headers)


class NativeErrorDetail(TypedDict):
    """What was wrong: a stable code, a sentence, and the name of the field at fault, if any."""

    code: str
    message: str
    field: str | None


class NativeError(TypedDict):
    """Error body of the server's own routes."""

    error: NativeErrorDetail


def _native_body(error: HttpError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "field": error.field}}


NATIVE_ERRORS = ErrorFormat(_native_body, NativeError)


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
