"""The application around a scripted service, and a client of it over ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

import httpx
import pytest

from app.api.application import create_app
from app.api.routing import ApiRuntime
from tests.api.scripted_service import Conversation, CountingMetrics, Lifetime, ScriptedService


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def metrics() -> CountingMetrics:
    return CountingMetrics()


@pytest.fixture
def build(service: ScriptedService, metrics: CountingMetrics) -> Callable[..., Any]:
    """The application; keys may be given. It is made once, which takes longer than most tests; what it stands before is this test's own."""

    def make(api_keys: tuple[str, ...] = ()) -> Any:
        info = lambda: {"plan": {"threads": {"value": 1, "reason": "because"}}}  # noqa: E731
        runtime = ApiRuntime(service, metrics, Lifetime(), info, created=1_700_000_000, api_keys=api_keys)  # type: ignore[arg-type]
        app = create_app(runtime) if api_keys else application()
        app.state.runtime = runtime
        return app

    return make


@cache
def application() -> Any:
    nothing: Any = None
    return create_app(ApiRuntime(nothing, nothing, Lifetime(), dict, created=1))


@pytest.fixture
def app(build: Callable[..., Any]) -> Any:
    return build()


@pytest.fixture
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
        yield client


@pytest.fixture
def conversation(app: Any) -> Callable[..., Conversation]:
    return lambda path, body, headers=None: Conversation(app, path, body, headers)
