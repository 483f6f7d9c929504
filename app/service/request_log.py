"""The log line of one request: what it asked for, and how long it took. It never has content of a request.

The API notes route and status, and the service tokens and times. Both find the request by `REQUEST_FIGURES`, since one
HTTP request may be several of the service, such as one for each prompt in a list.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from app.tracing.request_trace import RequestTrace

REQUEST_LOGGER = "armature.requests"
MAX_PATH_CHARACTERS = 100
log = logging.getLogger(REQUEST_LOGGER)


@dataclass(slots=True)
class RequestFigures:
    """Tokens, seconds and error of one HTTP request, as far as the model has served it.

    The seconds are those from arrival to the first step (`queue_seconds`) and to the first token, of the part that
    waited longest; None if there was none. `trace` is what its span will say; None if it is not traced. `error` is the
    code of the error that its client was sent, also as the last event of a stream; empty if there was none.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    trace: RequestTrace | None = None
    error: str = ""

    def add(
        self, prompt_tokens: int, completion_tokens: int, queue_seconds: float | None, first_token_seconds: float | None
    ) -> None:
        """Add one request of the service."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.queue_seconds = _longest(self.queue_seconds, queue_seconds)
        self.first_token_seconds = _longest(self.first_token_seconds, first_token_seconds)


# Figures of the HTTP request that this context serves; None outside of one.
REQUEST_FIGURES: ContextVar[RequestFigures | None] = ContextVar("request_figures", default=None)


def note_error(code: str) -> None:
    """Note the code of the error that the client of this context's request is sent."""
    if (figures := REQUEST_FIGURES.get()) is not None:
        figures.error = code


def request_level(method: str) -> int:
    """Return the level of a request's line: probes, scrapes and pages, which only read, are logged at debug."""
    return logging.DEBUG if method in ("GET", "HEAD", "OPTIONS") else logging.INFO


def log_request(
    method: str, path: str, request_id: str, status: int, seconds: float, figures: RequestFigures | None
) -> None:
    """Log a request that has ended.

    Args:
        method: HTTP's method.
        path: Path without the query. Characters that could end the line or colour a terminal are escaped.
        request_id: Printable id of the request.
        status: Status of the response; 499 (nginx's convention) if the client left.
        seconds: Time from the request's head to the end of the response.
        figures: What the model did for it.
    """
    known = figures or RequestFigures()
    fields: dict[str, object] = {
        "id": request_id,
        "method": method,
        "route": _escaped(path[:MAX_PATH_CHARACTERS]),
        "status": status,
        "prompt_tokens": known.prompt_tokens,
        "completion_tokens": known.completion_tokens,
        "queue_ms": _milliseconds(known.queue_seconds),
        "first_token_ms": _milliseconds(known.first_token_seconds),
        "total_ms": _milliseconds(seconds),
    }
    if known.trace is not None:
        fields["trace_id"] = known.trace.exemplar["trace_id"]
    shown = " ".join(f"{name}={'-' if value is None else value}" for name, value in list(fields.items())[4:])
    message = f"{method} {fields['route']} {status} id={request_id} {shown}"
    log.log(request_level(method), "%s", message, extra={"fields": fields})


@lru_cache(maxsize=128)  # most requests are for a few routes
def _escaped(path: str) -> str:
    return quote(path, safe="/:@!$&'()*+,;=~")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def _longest(one: float | None, other: float | None) -> float | None:
    return max((seconds for seconds in (one, other) if seconds is not None), default=None)
