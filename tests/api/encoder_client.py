"""The application around an encoder's service whose worker computes by hand, and a client of it over ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx

from app.api.application import create_app
from app.api.routing import ApiRuntime
from app.api.schemas import NewNames
from app.models.encoders.config import EncoderConfig
from fake_encoder import CONFIG, LIMITS, EncodingWorker, encoding
from tests.api.scripted_service import Lifetime


@cache
def _application() -> Any:
    """One for all tests: to make it takes longer than to ask it."""
    return create_app(ApiRuntime(None, None, Lifetime(), dict, created=1_700_000_000))  # type: ignore[arg-type]


@asynccontextmanager
async def asking(config: EncoderConfig = CONFIG) -> AsyncIterator[tuple[httpx.AsyncClient, EncodingWorker]]:
    async with encoding(config, LIMITS) as (service, worker, _):
        app = _application()
        mine = {"service": service, "metrics": service._client.metrics, "new_names": NewNames()}
        app.state.runtime = replace(app.state.runtime, **mine)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
            yield client, worker


async def answer_of(config: EncoderConfig, path: str, body: Any) -> httpx.Response:
    """One request and its answer."""
    async with asking(config) as (client, _):
        return await client.post(path, json=body)
