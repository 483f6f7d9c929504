"""What probes, scrapers and curious people ask: alive, ready, what this is, and how it is doing."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.dependencies import runtime_of
from app.api.errors import LOADING_RETRY_SECONDS
from app.errors import InvalidRequest
from app.version import VERSION

MOST_DIGITS = 18  # of a step's number: more steps than a machine lives to make


async def healthz(request: Request) -> Response:
    """Fails when the worker thread has died: nothing but a restart helps then."""
    alive = runtime_of(request).service.alive
    return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 500)


async def readyz(request: Request) -> Response:
    service = runtime_of(request).service
    if service.ready:
        return JSONResponse({"status": "ready"})
    status = "stopping" if service.stage == "stopping" else "loading"
    body = {"status": status, "stage": service.stage}
    return JSONResponse(body, 503, headers={"retry-after": str(LOADING_RETRY_SECONDS)})


async def info(request: Request) -> Response:
    """What is known by now; while loading that is less."""
    runtime = runtime_of(request)
    snapshot = runtime.service.snapshot
    capacity: dict[str, Any] = asdict(snapshot) | {"kv_usage_ratio": snapshot.kv_usage_ratio}
    return JSONResponse({"version": VERSION, "stage": runtime.service.stage, **runtime.info(), "capacity": capacity})


async def steps(request: Request) -> Response:
    """The engine's last steps, by number: what came after the one that a client asked for last."""
    after = _whole(request.query_params.get("after", "0"))
    return JSONResponse({"clock": time.time(), **runtime_of(request).metrics.steps.since(after)})


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise InvalidRequest("after is the number of a step, 0 or more: what the answer before called `next`.", field="after")
    return int(text)


async def metrics(request: Request) -> Response:
    """Answered on the event loop from counters that are already filled: a scrape never waits for a step."""
    body, content_type = runtime_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
