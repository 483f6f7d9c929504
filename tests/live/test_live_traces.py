"""Traces of a running server: every dialect, parents, streams, choices, errors, clients that leave, exemplars of its metrics."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.errors import StepFailed
from external_tools import tool
from loopback_prometheus import watching
from otlp_collector import KeptSpan, OtlpCollector, collecting
from tests.live.live_server import LiveServer, live, until
from tiny_encoders import Modules, write_encoder

SECRET = "Once upon a secret"
PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0"}
EXEMPLARS = (
    "request_seconds",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
)


@pytest.fixture(scope="module")
def kept() -> Iterator[OtlpCollector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def traced(tiny: Path, kept: OtlpCollector) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with live(tiny, otlp_traces_endpoint=kept.url, max_waiting_requests=1, max_running_seqs=8) as server:
            yield server


@pytest.fixture
def collector(kept: OtlpCollector) -> OtlpCollector:
    kept.clear()
    return kept


def post(server: LiveServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return server.client.post(path, json=body, headers=headers)


def the_span(collector: OtlpCollector, response: httpx.Response) -> KeptSpan:
    """The only server span, which is the one that the response names."""
    (found,) = collector.wait()
    assert response.headers["traceresponse"].startswith(f"00-{found.trace_id}-{found.span_id}-")
    assert found.attributes["gen_ai.request.id"] == response.headers["x-request-id"]
    assert found.attributes["http.response.status_code"] == response.status_code
    return found


CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, "temperature": 0.5}
TEXT = {"prompt": SECRET, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"model": "tiny", **CHAT, "ignore_eos": True}, "chat tiny"),
        ("/chat/completions", {"model": "tiny", **CHAT, "ignore_eos": True}, "chat tiny"),
        ("/v1/responses", {"model": "tiny", "input": SECRET, "max_output_tokens": 6}, "chat tiny"),
        ("/v1/messages", {"model": "tiny", **CHAT}, "chat tiny"),
        ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "stream": False}, "chat tiny"),
        ("/v1/completions", {"model": "tiny", **TEXT}, "text_completion tiny"),
        ("/api/generate", {"model": "tiny", "prompt": SECRET, "stream": False}, "text_completion tiny"),
        ("/completion", {"prompt": SECRET, "n_predict": 6}, "text_completion tiny"),
        ("/generate", TEXT, "text_completion tiny"),
        ("/invocations", {"model": "tiny", **CHAT}, "chat tiny"),
        ("/v2/models/tiny/generate", {"text_input": SECRET, "parameters": {"max_tokens": 6}}, "text_completion tiny"),
    ],
)
def test_every_dialect_makes_one_span_with_three_phases(
    path: str, body: dict[str, Any], name: str, traced: LiveServer, collector: OtlpCollector
) -> None:
    began = time.time()
    response = post(traced, path, body)
    ended = time.time()
    assert response.status_code == 200, response.text
    found = the_span(collector, response)
    assert (found.name, found.status, found.parent_id) == (name, "unset", "")
    assert found.attributes["http.route"] == path.replace("/tiny/", "/{name:path}/")
    assert found.attributes["gen_ai.operation.name"] == name.split()[0]
    assert found.attributes["gen_ai.usage.input_tokens"] > 0
    assert found.attributes["gen_ai.usage.output_tokens"] >= 1
    assert found.attributes["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    phases = collector.phases(found)
    assert [each.name for each in phases] == ["queue", "prefill", "decode"][: len(phases)] and len(phases) >= 2
    assert found.began <= phases[0].began and phases[-1].ended <= found.ended
    assert began - 0.1 <= found.began and found.ended <= ended + 0.1
    assert all(one.ended == other.began for one, other in itertools.pairwise(phases))
    assert not any(b"secret" in each for each in collector.bodies)
    if (identity := response.json().get("id")) is not None:
        assert found.attributes["gen_ai.response.id"] == identity


def test_the_figures_are_those_of_the_answer(traced: LiveServer, collector: OtlpCollector) -> None:
    response = post(traced, "/v1/completions", {"model": "tiny", **TEXT, "temperature": 0, "seed": 3})
    found, usage = the_span(collector, response), response.json()["usage"]
    wanted = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 3}
    assert {name: found.attributes[f"gen_ai.request.{name}"] for name in wanted} == wanted
    assert found.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert "gen_ai.request.stream" not in found.attributes
    queue, prefill, decode = collector.phases(found)
    told = {
        part.split(";")[0].strip(): float(part.split("dur=")[1])
        for part in response.headers["server-timing"].split(",")
    }
    assert queue.ended - queue.began == pytest.approx(told["queue"] / 1e3, abs=2e-4)
    assert prefill.ended - prefill.began == pytest.approx(told["prefill"] / 1e3, abs=2e-4)
    assert decode.ended - decode.began > 0
    assert found.attributes["gen_ai.latency.time_to_first_token"] <= found.attributes["gen_ai.latency.e2e"]


def test_several_prompts_and_choices_are_one_span(traced: LiveServer, collector: OtlpCollector) -> None:
    body = {"model": "tiny", "prompt": [SECRET, "two", "three"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    response = post(traced, "/v1/completions", body)
    found, usage = the_span(collector, response), response.json()["usage"]
    assert found.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 18
    assert found.attributes["gen_ai.response.finish_reasons"] == ["length"] * 6
    assert found.attributes["gen_ai.request.choice.count"] == 2
    assert [each.name for each in collector.phases(found)] == ["queue", "prefill", "decode"]
    assert len(collector.spans) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_stream_is_named_as_one(path: str, traced: LiveServer, collector: OtlpCollector) -> None:
    found = the_span(
        collector,
        post(traced, path, {"model": "tiny", **({} if "api" in path else TEXT), "prompt": "a", "stream": True}),
    )
    assert found.attributes["gen_ai.request.stream"] is True
    assert found.attributes["gen_ai.response.time_to_first_chunk"] > 0


def test_the_client_decides_by_its_traceparent(traced: LiveServer, collector: OtlpCollector) -> None:
    silent = post(traced, "/generate", TEXT, traceparent=f"{PARENT}-00")
    assert silent.headers["traceresponse"].startswith("00-" + "ab" * 16) and silent.headers["traceresponse"].endswith(
        "-00"
    )
    found = the_span(collector, post(traced, "/generate", TEXT, traceparent=f"{PARENT}-01", tracestate="vendor=x"))
    assert (found.trace_id, found.parent_id, found.trace_state) == ("ab" * 16, "cd" * 8, "vendor=x")
    assert len(collector.servers) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/input_tokens", "/nothing"])
def test_other_routes_are_not_traced(path: str, traced: LiveServer, collector: OtlpCollector) -> None:
    assert "traceresponse" not in post(traced, path, {"prompt": "a"}).headers
    assert "traceresponse" not in traced.client.get("/v1/completions").headers
    assert "traceresponse" in post(traced, "/generate", TEXT).headers
    assert len(collector.wait()) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "temperature": 9}, 400, "invalid_request"),
        ("/v2/models/other/generate", {"text_input": "a"}, 404, "model_not_found"),
        ("/v1/completions", {"model": "tiny", "prompt": "a " * 400}, 400, "context_length_exceeded"),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}, 400, "wrong_model_kind"),
    ],
)
def test_a_mistake_of_the_client_has_its_code_and_no_phases(
    path: str, body: dict[str, Any], status: int, code: str, traced: LiveServer, collector: OtlpCollector
) -> None:
    response = post(traced, path, body)
    assert response.status_code == status, response.text
    found = the_span(collector, response)
    assert (found.status, found.attributes["error.type"]) == ("unset", code)
    assert collector.phases(found) == []


def test_a_step_that_fails_within_a_stream_is_an_error(traced: LiveServer, collector: OtlpCollector) -> None:
    traced.reins.hold()
    traced.reins.faults.append(RuntimeError("planted"))
    traced.reins.release()
    response = post(traced, "/v1/completions", {"model": "tiny", **TEXT, "stream": True})
    found = the_span(collector, response)
    assert (found.status, found.attributes["error.type"]) == ("error", StepFailed.code)


def test_overload_is_an_error(traced: LiveServer, collector: OtlpCollector) -> None:
    traced.reins.hold()
    callers = [Caller(traced, max_tokens=1) for _ in range(9)]
    until(lambda: traced.find_served.service.num_open == 9)
    response = post(traced, "/generate", TEXT)
    assert response.status_code == 429
    found = the_span(collector, response)
    assert (found.name, found.status, found.attributes["error.type"]) == ("text_completion tiny", "error", "overloaded")
    traced.reins.release()
    for caller in callers:
        assert b"200 OK" in caller.socket.recv(4096)
        caller.socket.close()
    until(lambda: traced.idle)
    collector.wait(10)


class Caller:
    """A client on a bare socket, since it must be able to hang up at any moment."""

    def __init__(self, server: LiveServer, **body: Any) -> None:
        place = urlparse(server.url)
        assert place.hostname is not None
        self.socket = socket.create_connection((place.hostname, place.port or 80), timeout=60)
        content = json.dumps({**TEXT, "max_tokens": 200, **body}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_status_499(stream: bool, traced: LiveServer, collector: OtlpCollector) -> None:
    traced.reins.hold()
    caller = Caller(traced, stream=stream)
    assert traced.reins.reached.wait(60)
    caller.socket.close()
    until(lambda: traced.find_served.service.num_open == 0)
    traced.reins.release()
    (found,) = collector.wait()
    assert (found.status, found.attributes["error.type"]) == ("error", "client_disconnected")
    assert found.attributes["http.response.status_code"] == 499
    until(lambda: traced.idle)


def exemplars(text: str) -> dict[str, list[dict[str, str]]]:
    """The labels of all exemplars by the name of their histogram."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse_openmetrics(text):
        for sample in family.samples:
            if sample.exemplar is not None:
                found.setdefault(family.name.removeprefix("armature_"), []).append(sample.exemplar.labels)
    return found


def test_histograms_have_the_ids_of_sampled_requests_as_exemplars(tiny: Path, collector: OtlpCollector) -> None:
    with live(tiny, otlp_traces_endpoint=collector.url, trace_sample_ratio=0) as server:
        assert post(server, "/generate", TEXT).status_code == 200
        assert exemplars(server.client.get("/metrics", headers=OPENMETRICS).text) == {}
        response = post(server, "/generate", TEXT, traceparent=f"{PARENT}-01")
        span_id = response.headers["traceresponse"].split("-")[2]
        found = exemplars(server.client.get("/metrics", headers=OPENMETRICS).text)
        assert found.keys() == set(EXEMPLARS)
        for labels in found.values():
            assert all(each == {"trace_id": "ab" * 16, "span_id": span_id} for each in labels)
        plain = server.client.get("/metrics").text
    assert "trace_id" not in plain
    assert any(family.name == "armature_request_seconds" for family in parse_text(plain))


def test_the_line_of_a_request_has_its_trace(
    traced: LiveServer, collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "armature.requests"):
        found = the_span(collector, post(traced, "/generate", TEXT))
        until(lambda: len(caplog.records) == 1)
    assert caplog.records[0].__dict__["fields"]["trace_id"] == found.trace_id
    assert caplog.messages[0].endswith(f" trace_id={found.trace_id}")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": [SECRET, "two"]}, "embeddings embedder"),
        ("/embed", {"inputs": SECRET}, "embeddings embedder"),
        ("/", {"inputs": SECRET}, "POST /"),
        ("/rerank", {"query": SECRET, "texts": ["a", "b"]}, "rerank embedder"),
        ("/v1/score", {"queries": SECRET, "documents": ["a", "b"]}, "score embedder"),
    ],
)
def test_an_encoders_request_has_a_queue_and_an_encoding(
    path: str, body: dict[str, Any], name: str, embedder: LiveServer, collector: OtlpCollector
) -> None:
    response = post(embedder, path, body)
    assert response.status_code == 200, response.text
    found = the_span(collector, response)
    assert found.name == name
    assert [each.name for each in collector.phases(found)] == ["queue", "encode"]
    assert found.attributes["gen_ai.usage.input_tokens"] > 0
    assert not any(b"secret" in each for each in collector.bodies)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, kept: OtlpCollector) -> Iterator[LiveServer]:
    directory = write_encoder(tmp_path_factory.mktemp("traced") / "embedder", "BertModel", modules=Modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with live(directory, otlp_traces_endpoint=kept.url) as server:
            yield server


def test_a_stop_sends_the_spans_of_the_last_requests(
    tiny: Path, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with live(tiny, otlp_traces_endpoint=collector.url) as server:
        assert post(server, "/generate", TEXT).status_code == 200
        assert collector.servers == []
    assert len(collector.servers) == 1


@pytest.mark.full
def test_prometheus_keeps_the_exemplars(tiny: Path, collector: OtlpCollector, tmp_path: Path) -> None:
    program = tool("prometheus")
    with (
        live(tiny, otlp_traces_endpoint=collector.url) as server,
        watching(program, tmp_path, {}, [server.url]) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):

        def known() -> list[dict[str, Any]]:
            query = {"query": "armature_time_to_first_token_seconds_bucket", "start": "0", "end": str(time.time() + 60)}
            data: list[dict[str, Any]] = client.get("/api/v1/query_exemplars", params=query).json()["data"]
            return [exemplar for series in data for exemplar in series["exemplars"]]

        assert post(server, "/generate", TEXT, traceparent=f"{PARENT}-01").status_code == 200
        until(lambda: bool(known()))
        assert {exemplar["labels"]["trace_id"] for exemplar in known()} == {"ab" * 16}
