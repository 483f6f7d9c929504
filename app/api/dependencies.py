"""What the endpoints are given: the service and its companions, a parsed body, the request's id, and a count of what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from app.api.schemas import Body_, parse
from app.errors import InvalidRequest, ModelNotFound, RequestError
from app.metrics import Api, Metrics
from app.service import Service


class Lifetime(Protocol):
    """What begins when the port opens and ends when the server stops: the service's loop and the worker's thread."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """All that the faces stand before. `info` is what `/info` says beside the model and the capacity; it is called at each request."""

    service: Service
    metrics: Metrics
    lifetime: Lifetime
    info: Callable[[], dict[str, Any]]
    created: int  # when the process began, Unix seconds: OpenAI's model list wants one
    api_keys: tuple[str, ...] = ()


def runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


def request_id(request: Request) -> str:
    identity: str = request.state.request_id
    return identity


async def read_body(request: Request, model: type[Body_]) -> Body_:
    """The body as this shape. Only what says that it is JSON is read: a web page can post anything else to us without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest("Send the body as JSON with the header `content-type: application/json`.")
    body = await request.body()
    if not body.strip():
        raise InvalidRequest("The body is empty: send a JSON object.")
    return parse(model, body)


@contextmanager
def counting_refusals(metrics: Metrics, api: Api) -> Iterator[None]:
    """What is refused in here never reaches the service, which counts its own."""
    try:
        yield
    except RequestError:
        metrics.refused(api)
        raise


def check_model(service: Service, name: str | None) -> None:
    """Absent means the one that is served."""
    served = service.model.name
    if name is not None and name != served:
        raise ModelNotFound(f"The model {name[:100]!r} is not served here; {served!r} is.", field="model")
