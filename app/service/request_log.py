"""One HTTP request as the service sees it, and its log line, which never has content of a request.

One HTTP request may be several requests of the service, such as one for each prompt in a list.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from app.service.rate_limit import ClientAccount
from app.tracing.request_trace import RequestTrace

REQUEST_LOGGER = "armature.requests"
MAX_PATH_CHARACTERS = 100
log = logging.getLogger(REQUEST_LOGGER)


@dataclass(slots=True)
class ClientRequest:
    """One HTTP request: who pays for it, its trace, and what the model has done for it.

    `account` is None without limits, and `trace` if it is not sampled. The seconds are from arrival to the first step
    (`queue_seconds`) and to the first token, of the part that waited longest; None if there was none. `error` is the
    code of the error that its client was sent, also as the last event of a stream. `model` is the name of one of
    several models, empty otherwise. `rows` are those of a program's inputs, which has no tokens.
    """

    account: ClientAccount | None = None
    trace: RequestTrace | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    error: str = ""
    model: str = ""
    rows: int = 0

    def add(
        self, prompt_tokens: int, completion_tokens: int, queue_seconds: float | None, first_token_seconds: float | None
    ) -> None:
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.queue_seconds = _longest(self.queue_seconds, queue_seconds)
        self.first_token_seconds = _longest(self.first_token_seconds, first_token_seconds)


# The HTTP request that this context serves; None outside of one.
CLIENT_REQUEST: ContextVar[ClientRequest | None] = ContextVar("client_request", default=None)


def note_error(code: str) -> None:
    if (client_request := CLIENT_REQUEST.get()) is not None:
        client_request.error = code


def request_level(method: str) -> int:
    """Return the level of a request's line: probes, scrapes and pages, which only read, are logged at debug."""
    return logging.DEBUG if method in ("GET", "HEAD", "OPTIONS") else logging.INFO


def log_request(
    method: str, path: str, request_id: str, status: int, seconds: float, client_request: ClientRequest
) -> None:
    """Log a request that has ended. `seconds` count from its head to the end of the response.

    Characters of `path` that could end the line or colour a terminal are escaped. `status` is 499 (nginx's convention)
    if the client left.
    """
    fields: dict[str, object] = {
        "id": request_id,
        "method": method,
        "route": _escaped(path[:MAX_PATH_CHARACTERS]),
        "status": status,
        **_sizes(client_request),
        "queue_ms": _milliseconds(client_request.queue_seconds),
        "first_token_ms": _milliseconds(client_request.first_token_seconds),
        "total_ms": _milliseconds(seconds),
    }
    if client_request.model:
        fields["model"] = client_request.model
    if client_request.trace is not None:
        fields["trace_id"] = client_request.trace.exemplar["trace_id"]
    # `log.log` would look for the caller in the stack, which no form of the log shows.
    extra = {"fields": fields}
    log.handle(log.makeRecord(log.name, request_level(method), "", 0, _Line(fields), (), None, extra=extra))


def _sizes(client_request: ClientRequest) -> dict[str, int]:
    if client_request.rows:
        return {"rows": client_request.rows}
    return {"prompt_tokens": client_request.prompt_tokens, "completion_tokens": client_request.completion_tokens}


@dataclass(frozen=True, slots=True)
class _Line:
    """A message that is formatted by the thread that writes it."""

    fields: Mapping[str, object]

    def __str__(self) -> str:
        shown = " ".join(f"{name}={'-' if value is None else value}" for name, value in list(self.fields.items())[4:])
        return "{method} {route} {status} id={id} ".format_map(self.fields) + shown


@lru_cache(maxsize=128)  # most requests are for a few routes
def _escaped(path: str) -> str:
    return quote(path, safe="/:@!$&'()*+,;=~")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def _longest(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
