"""Which requests are traced, and what the gate says of each to its span; without OpenTelemetry, by a tracer that notes it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from app.api.application import ROUTES, create_app
from app.api.routing import ApiRuntime
from app.errors import StepFailed
from app.tracing.request_trace import RequestTrace
from tests.api.scripted_service import Conversation, CountingMetrics, Lifetime, ScriptedService, deltas

# Operations that read or change something else than a model's answer.
UNTRACED = set(
    "apply_template control count_input_tokens count_tokens decode detokenize embed_sparse index load_adapter load_model "
    "pull show tokenize unload_adapter unload_model".split()
)
PROMPT = {"prompt": "a"}


@dataclass
class NotedSpan:
    """`ended` are the arguments of its end."""

    route: str
    operation: str
    trace: RequestTrace | None
    traceresponse: str = "00-aa-bb-01"
    ended: list[tuple[str, int, str | None, bool]] = field(default_factory=list)

    def end(self, request_id: str, status: int, error: str | None, is_stream: bool) -> None:
        self.ended.append((request_id, status, error, is_stream))


@dataclass
class NotingTracer:
    spans: list[NotedSpan] = field(default_factory=list)
    samples: bool = True

    def begin(self, scope: Mapping[str, Any], route: str, operation: str) -> NotedSpan:
        trace = RequestTrace({"trace_id": "aa", "span_id": "bb"}) if self.samples else None
        self.spans.append(NotedSpan(route, operation, trace))
        return self.spans[-1]

    def close(self, seconds: float) -> None:
        """Nothing is kept."""


@pytest.fixture
def tracer() -> NotingTracer:
    return NotingTracer()


@pytest.fixture
def traced(service: ScriptedService, metrics: CountingMetrics, tracer: NotingTracer) -> Any:
    keys = ("key",)
    return create_app(ApiRuntime(service, metrics, Lifetime(), dict, created=1, api_keys=keys, tracer=tracer))  # type: ignore[arg-type]


async def post(app: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
        return await client.post(path, json=body, headers={"x-api-key": "key", **headers})


def test_every_route_that_takes_a_body_is_traced_or_known_not_to_be() -> None:
    untraced = {route.serve.__name__ for route in ROUTES if route.method == "POST" and route.operation is None}
    assert untraced == UNTRACED
    assert not [route for route in ROUTES if route.method == "GET" and route.operation is not None]


@pytest.mark.parametrize(
    ("path", "route", "operation"),
    [
        ("/v1/chat/completions", "/v1/chat/completions", "chat"),
        ("/completions", "/completions", "text_completion"),
        ("/v2/models/a/b/generate", "/v2/models/{name:path}/generate", "text_completion"),
        ("/v2/models/demo/versions/1/infer", "/v2/models/{name:path}/versions/{version}/infer", "infer"),
        ("/invocations", "/invocations", ""),
    ],
)
async def test_a_span_has_the_template_of_its_route(
    path: str, route: str, operation: str, traced: Any, tracer: NotingTracer
) -> None:
    await post(traced, path, {})
    assert [(span.route, span.operation) for span in tracer.spans] == [(route, operation)]


@pytest.mark.parametrize(
    ("body", "headers", "status", "error"),
    [
        (PROMPT, {}, 200, None),
        ({"prompt": 1}, {}, 400, "invalid_request"),
        (PROMPT, {"x-api-key": "wrong"}, 401, "unauthorized"),
        (PROMPT, {"content-encoding": "br"}, 400, "invalid_request"),
    ],
)
async def test_a_span_ends_with_status_and_code(
    body: Any, headers: dict[str, str], status: int, error: str | None, traced: Any, tracer: NotingTracer
) -> None:
    response = await post(traced, "/generate", body, **headers)
    assert response.headers["traceresponse"] == "00-aa-bb-01"
    assert tracer.spans[0].ended == [(response.headers["x-request-id"], status, error, False)]


async def test_an_unexpected_error_and_one_of_the_engine_have_their_codes(
    traced: Any, tracer: NotingTracer, service: ScriptedService
) -> None:
    service.scripts = [[RuntimeError("planted")], [StepFailed("planted")]]
    for status, error in ((500, "internal_error"), (500, "step_failed")):
        assert (await post(traced, "/generate", PROMPT)).status_code == status
        assert tracer.spans[-1].ended[0][1:] == (status, error, False)


@pytest.mark.parametrize(
    ("path", "body"), [("/generate", PROMPT | {"stream": True}), ("/api/generate", PROMPT | {"model": "demo"})]
)
async def test_a_complete_stream_has_status_200(path: str, body: Any, traced: Any, tracer: NotingTracer) -> None:
    assert (await post(traced, path, body)).status_code == 200
    assert tracer.spans[0].ended[0][1:] == (200, None, True)


async def test_a_client_that_leaves_is_no_success(traced: Any, tracer: NotingTracer, service: ScriptedService) -> None:
    service.scripts = [[deltas("a")[0], asyncio.Event()]]
    conversation = Conversation(traced, "/generate", b'{"prompt": "a", "stream": true}', {"x-api-key": "key"})
    await conversation.until(2)
    conversation.release()
    await conversation.task
    assert tracer.spans[0].ended[0][1:] == (499, "client_disconnected", True)


@pytest.mark.parametrize("path", ["/tokenize", "/nothing", "/v1/chat/completions/input_tokens"])
async def test_other_requests_have_no_span(path: str, traced: Any, tracer: NotingTracer) -> None:
    assert "traceresponse" not in (await post(traced, path, {})).headers
    async with httpx.AsyncClient(transport=httpx.ASGITransport(traced), base_url="http://armature") as client:
        assert "traceresponse" not in (await client.get("/healthz")).headers
    assert tracer.spans == []


async def test_what_is_not_sampled_is_named_and_notes_nothing(
    traced: Any, tracer: NotingTracer, service: ScriptedService
) -> None:
    tracer.samples = False
    response = await post(traced, "/v1/completions", {"model": "demo", "prompt": "a"})
    assert response.headers["traceresponse"] == "00-aa-bb-01"
    assert tracer.spans[0].trace is None and len(tracer.spans[0].ended) == 1


async def test_the_id_of_the_response_is_noted(traced: Any, tracer: NotingTracer) -> None:
    response = await post(
        traced, "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
    )
    trace = tracer.spans[0].trace
    assert trace is not None and trace.attributes["gen_ai.response.id"] == response.json()["id"]
