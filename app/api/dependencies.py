"""Common parts of the endpoints: the runtime, the request id, and a counter of refused requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from app.errors import ModelNotFound, RequestError
from app.metrics.instruments import Api, Metrics
from app.service.service import Service


class Lifespan(Protocol):
    """Start and stop of the server's background work: the service's event loop and the worker thread."""

    async def start(self) -> None:
        """Start; called once when the server begins to listen."""

    async def stop(self) -> None:
        """Stop; called once at shutdown."""


@dataclass(frozen=True, slots=True)
class ApiRuntime:
    """Everything that the endpoints use.

    `info` returns the part of `/info` that is not the version, stage or capacity; it is called for each request.
    """

    service: Service
    metrics: Metrics
    lifetime: Lifespan
    info: Callable[[], dict[str, Any]]
    created: int  # start of the process, Unix seconds; OpenAI's model list has this field
    api_keys: tuple[str, ...] = ()


def runtime_of(request: Request) -> ApiRuntime:
    """Return the runtime of the application that received the request."""
    runtime: ApiRuntime = request.app.state.runtime
    return runtime


def request_id(request: Request) -> str:
    """Return the request id that the gate has assigned (`x-request-id`)."""
    identity: str = request.state.request_id
    return identity


@contextmanager
def count_refusals(metrics: Metrics, api: Api) -> Iterator[None]:
    """Count a `RequestError` raised in the block as refused.

    Use it only for errors before the request reaches the service, which counts its own.
    """
    try:
        yield
    except RequestError:
        metrics.refused(api)
        raise


def check_model(service: Service, name: str | None) -> None:
    """Check that `name` is the served model; None always passes. Raises `ModelNotFound`."""
    served = service.model.name
    if name is not None and name != served:
        raise ModelNotFound(f"The model {name[:100]!r} is not served here; {served!r} is.", field="model")
