"""Several API processes: the same answers as of one, one admission and one exposition, and what the end of one leaves.

The main process of these servers takes no connections, so that every request reaches the one beside it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.server import subprocesses
from app.service.admission import OpenCounts
from app.settings import DEMO_DIRECTORY
from tests.live.live_server import PATIENCE, LiveServer, ServerProcess, live, server_process, until
from tests.live.several_models import several
from tests.live.test_live_engine_process import STREAMS, WHOLE, engine_of, is_running, open_stream, said, streamed
from tiny_encoders import write_encoder

NUM_LEAVERS, AT_ONCE = 2_000, 50
LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def one() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, calibrate="off") as server:
        yield server


@pytest.fixture(scope="module")
def two() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, calibrate="off", api_processes=2) as server:
        yield server


def num_passed(server: LiveServer) -> int:
    """How many requests the main process has answered for the other one."""
    assert server.processes is not None
    return server.processes.num_passed


def process_of(server: LiveServer) -> Any:
    assert server.processes is not None
    (other,) = server.processes.others
    return other


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("path", STREAMS)
def test_each_dialect_streams_the_same(one: LiveServer, two: LiveServer, path: str) -> None:
    before = num_passed(two)
    assert streamed(two, path) == streamed(one, path)
    assert num_passed(two) == before


@pytest.mark.parametrize("kind", WHOLE)
def test_each_answer_is_the_same(one: LiveServer, two: LiveServer, kind: str) -> None:
    path, body = WHOLE[kind]
    answers = [server.client.post(path, json={"temperature": 0, **body}) for server in (two, one)]
    assert answers[0].status_code == answers[1].status_code
    assert list(said(answers[0].json())) == list(said(answers[1].json())) != []


def test_the_main_process_answers_what_no_model_computes(one: LiveServer, two: LiveServer) -> None:
    before = num_passed(two)
    requests: list[tuple[str, str, Any]] = [
        *(
            ("GET", path, None)
            for path in ("/healthz", "/readyz", "/v1/models", "/", "/nowhere", "/api/tags", "/metrics")
        ),
        ("POST", "/tokenize", {"prompt": "a b"}),
        ("POST", "/tokenize", {"prompt": 3}),
        ("DELETE", "/v1/models", None),
    ]
    for method, path, body in requests:
        mark = {"x-request-id": "mine"}
        answers = [each.client.request(method, path, json=body, headers=mark) for each in (two, one)]
        assert [each.headers["x-request-id"] for each in answers] == ["mine", "mine"]
        assert answers[0].status_code == answers[1].status_code, path
        kept = ("created", "modified_at", "digest")
        if path != "/metrics":
            assert [line for line in answers[0].text.split(",") if not any(map(line.__contains__, kept))] == [
                line for line in answers[1].text.split(",") if not any(map(line.__contains__, kept))
            ]
    assert num_passed(two) == before + 8  # not those of no route
    info = two.client.get("/info").json()
    assert [info["plan"][name]["value"] for name in ("api_processes", "engine_process")] == [2, True]


def test_a_scrape_has_what_all_have_counted(two: LiveServer) -> None:
    def counts() -> list[float]:
        text = two.client.get("/metrics").text
        assert (
            "armature_api_process_ends_total 0.0" in text and 'armature_throughput_per_second{kind="requests"}' in text
        )
        return [
            two.metric("armature_requests_total", api="native", outcome="length"),
            two.metric("armature_tokens_total", kind="completion"),
            two.metric("armature_request_seconds_count", api="native"),
            two.metric("armature_http_requests_total", method="POST", route="/generate", status="200", code=""),
        ]

    before = counts()
    assert two.generate(max_tokens=5, ignore_eos=True).status_code == 200
    assert [now - was for now, was in zip(counts(), before, strict=True)] == [1, 5, 1, 1]
    assert two.metric("armature_latency_quantile_seconds", metric="ttft", quantile="0.5") > 0


@pytest.fixture(scope="module")
def limited(tiny: Path) -> Iterator[LiveServer]:
    """Both processes take connections."""
    limits = {"max_running_seqs": 1, "max_waiting_requests": 1, "rate_limit": "requests=6"}
    with live(tiny, all_accept=True, calibrate="off", api_processes=2, **limits) as server:
        yield server


def statuses(server: LiveServer, number: int) -> list[int]:
    """Of requests on connections of their own, each of which any process takes."""
    found = []
    for _ in range(number):
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            found.append(client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code)
    return found


def test_places_and_rates_are_of_all_processes(limited: LiveServer) -> None:
    assert limited.processes is not None
    counts = [limited.processes.counts.of_model(0, number) for number in (0, 1)]
    for each in counts:  # as if each had an open request
        each.add(OpenCounts.OPEN, 1)
    refused = limited.generate(max_tokens=1)
    assert refused.status_code == 429 and "1 running and 1 waiting" in refused.text
    for each in counts:
        each.add(OpenCounts.OPEN, -1)
    assert statuses(limited, 8) == [200] * 5 + [429] * 3
    assert limited.metric("armature_requests_running") == 0


@pytest.mark.nightly
def test_what_leavers_asked_for_is_freed(two: LiveServer) -> None:
    for _ in range(NUM_LEAVERS // AT_ONCE):
        leavers = [open_stream(two, max_tokens=100) for _ in range(AT_ONCE)]
        assert leavers[0].recv(16)
        for each in leavers:
            each.close()
    until(lambda: two.idle)
    assert two.generate(max_tokens=2).status_code == 200


def begun(server: LiveServer, number: int) -> list[socket.socket]:
    opened = [open_stream(server, max_tokens=400) for _ in range(number)]
    for each in opened:
        assert each.recv(16)
    return opened


def test_a_killed_api_process_loses_its_own_requests_alone_and_is_started_again(
    two: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    other = process_of(two)
    other._delay.seconds, killed = 0.05, other.pid
    before = [two.metric(name) for name in ("armature_tokens_total", "armature_lost_requests_total")]
    opened = begun(two, 3)
    with caplog.at_level(logging.ERROR):
        os.kill(killed, signal.SIGKILL)
        for each in opened:
            each.settimeout(PATIENCE)
            while each.recv(65536):
                pass
            each.close()
        until(lambda: other.pid not in (None, killed) and bool(other.served))
    assert (
        "has ended by signal SIGKILL, and 3 requests that were open there are lost; it is started again" in caplog.text
    )
    until(lambda: two.idle)
    assert two.generate(max_tokens=2).status_code == 200
    assert two.metric("armature_lost_requests_total") == before[1] + 3
    assert two.metric("armature_api_process_ends_total") >= 1
    assert two.metric("armature_tokens_total") >= before[0]
    assert not two.fatal


def is_served_there(server: LiveServer) -> bool:
    """Ask for a text: has the process beside the main one written it?"""
    before = num_passed(server)
    return server.generate(max_tokens=2).status_code == 200 and num_passed(server) == before


def test_a_killed_engine_ends_the_requests_of_all_processes_with_an_error(two: LiveServer) -> None:
    engine, other = engine_of(two), process_of(two)
    engine._delay.seconds, killed, pid = 0.05, engine.pid, other.pid
    assert killed is not None
    with two.client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(killed, signal.SIGKILL)
        last = [line for line in lines if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "step_failed"
    until(lambda: two.client.get("/readyz").status_code == 200)
    until(lambda: is_served_there(two) and two.idle)
    assert other.pid == pid and not two.fatal


def test_an_api_process_that_cannot_be_started_is_tried_again(
    limited: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, begin = process_of(limited), subprocesses.subprocess.Popen
    other._delay.seconds = 0.02

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(subprocesses.subprocess, "Popen", fail)
    os.kill(other.pid, signal.SIGKILL)
    until(lambda: "could not be started ([Errno 12] no memory)" in caplog.text)
    assert statuses(limited, 1) != [503]
    monkeypatch.setattr(subprocesses.subprocess, "Popen", begin)
    until(lambda: bool(other.served))


def children(served: ServerProcess) -> dict[str, int]:
    pid = served.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(each): Path(f"/proc/{each}/comm").read_text().strip() for each in found}
    return {name: each for each, name in names.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "ends_by", ["stop", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("kill", "interrupt"))]
)
def test_all_processes_end_with_the_main_one(tiny: Path, ends_by: str) -> None:
    with server_process(tiny, "--api-processes", "2", "--calibrate", "off") as served:
        with httpx.Client(base_url=served.url(), timeout=PATIENCE) as client:
            until(lambda: client.get("/readyz").status_code == 200)
            until(lambda: {"armature-engine", "armature-api"} <= children(served).keys())
            pids = list(children(served).values())
            if ends_by == "kill":
                served.process.kill()
            else:
                drain(served, client, pids, ends_by)
                status, log = served.finish()
                assert status == 0 and "Traceback" not in log, log
        until(lambda: not any(map(is_running, pids)))


@pytest.mark.full
def test_tls_and_a_hangup_are_for_all_processes(tiny: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    (cert, key), keys = certificate, tmp_path / "keys"
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--api-key-file", str(keys))
    keys.write_text("first\n")
    os.utime(keys, (1e9, 1e9))
    context = ssl.create_default_context(cafile=cert)
    with server_process(tiny, "--api-processes", "2", "--calibrate", "off", *flags) as served:
        url = served.url()
        assert url.startswith("https://")

        def statuses(key: str) -> set[int]:
            """The statuses of as many connections as it takes until each process has some of them."""
            pids, found = (served.process.pid, children(served)["armature-api"]), set[int]()
            before = [num_files(pid) for pid in pids]
            with contextlib.ExitStack() as stack:
                while any(num_files(pid) < count + 8 for pid, count in zip(pids, before, strict=True)):
                    client = stack.enter_context(httpx.Client(base_url=url, verify=context, timeout=PATIENCE))
                    found.add(client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code)
            return found

        until(lambda: httpx.get(f"{url}/readyz", verify=context).status_code == 200)
        until(lambda: "armature-api" in children(served))
        assert statuses("first") == {200}
        keys.write_text("other\n")
        os.utime(keys, (1e9, 1e9))  # it looks unchanged
        assert (statuses("first"), statuses("other")) == ({200}, {401})
        served.process.send_signal(signal.SIGHUP)
        until(lambda: statuses("other") == {200})
        assert statuses("first") == {401}


def num_files(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def drain(served: ServerProcess, client: httpx.Client, pids: list[int], how: str) -> None:
    """Stop the whole group under streams, of which each process has some; all end as they should, or at once."""
    url = client.base_url
    opened = [httpx.Client(base_url=url, timeout=PATIENCE) for _ in range(6)]
    streams = [each.send(each.build_request("POST", "/v1/completions", json=LONG), stream=True) for each in opened]
    lines = [each.iter_lines() for each in streams]
    assert all(next(each) for each in lines)
    if how == "interrupt":
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
        served.process.wait(PATIENCE)
    else:
        for pid in (*pids, served.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert [[*each][-2:] for each in lines] == [["data: [DONE]", ""]] * len(lines)
    for stream, each in zip(streams, opened, strict=True):
        stream.close()
        each.close()


@pytest.mark.full
def test_several_models_are_loaded_used_and_unloaded_from_any_process(tiny: Path, tmp_path: Path) -> None:
    embed = write_encoder(tmp_path / "embed")
    models = {"tiny": tiny, "embed": {"model": embed, "load": "on-demand"}}
    with several(models, api_processes=2, model_control="on") as server:
        assert server.processes is not None
        (other,) = server.processes.others
        until(lambda: other.served == {0})
        assert server.states() == {"tiny": "ready", "embed": "unloaded"}
        answer = server.post("/v1/embeddings", model="embed", input="a")
        assert answer.status_code == 200 and server.states()["embed"] == "ready"
        until(lambda: other.served == {0, 1})
        before = server.processes.num_passed
        assert server.post("/v1/embeddings", model="embed", input="a").json()["data"] == answer.json()["data"]
        assert server.post("/v1/completions", model="tiny", prompt="a", max_tokens=3).status_code == 200
        assert server.post("/v1/completions", model="other", prompt="a").status_code == 404
        assert server.processes.num_passed == before + 1
        counted = 'armature_request_seconds_count{api="embeddings",model="embed"} 2.0'
        lines = [line for line in server.client.get("/metrics").text.splitlines() if "request_seconds_count" in line]
        assert counted in lines
        assert server.post("/v2/repository/models/embed/unload").status_code == 200
        assert server.states()["embed"] == "unloaded"
        assert server.post("/v1/embeddings", model="embed", input="a").status_code == 200
