"""The engine in a process of its own: the same answers as in a thread, and what its end and the server's leave behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.server import engine_process, subprocesses
from app.server.engine_process import EngineProcess
from app.settings import DEMO_DIRECTORY
from tests.live.live_server import PATIENCE, LiveServer, ServerProcess, live, server_process, starting, until

NUM_STREAMS, NUM_LEAVERS = 6, 300
CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}]}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"temperature": 0, "prompt": "Once upon", "max_tokens": 24},
    "/v1/chat/completions": {"temperature": 0, **CHAT, "max_tokens": 24},
    "/v1/responses": {"temperature": 0, "input": "Once upon a time", "max_output_tokens": 24},
    "/v1/messages": {"temperature": 0, **CHAT, "max_tokens": 24},
    "/api/generate": {"model": "any", "prompt": "Once upon", "options": {"num_predict": 24, "temperature": 0}},
    "/api/chat": {"model": "any", **CHAT, "options": {"num_predict": 24, "temperature": 0}},
    "/completion": {"temperature": 0, "prompt": "Once upon", "n_predict": 24},
    "/generate": {"temperature": 0, "prompt": "Once upon", "max_tokens": 24},
}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bo"]}}, "required": ["name"]}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "structured": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}},
    ),
    "log-probabilities": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 8, "logprobs": 3}),
    "choices": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 8, "n": 3, "temperature": 1, "seed": 5}),
    "stop": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 40, "stop": ["."]}),
    "too long": ("/v1/completions", {"prompt": "a " * 5_000, "max_tokens": 8}),
    "no grammar": ("/v1/completions", {"prompt": "a", "guided_regex": "(", "max_tokens": 8}),
}


@pytest.fixture(scope="module")
def apart() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, calibrate="off", engine_process="on") as server:
        yield server


@pytest.fixture(scope="module")
def together() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, calibrate="off", engine_process="off") as server:
        yield server


def engine_of(server: LiveServer) -> EngineProcess:
    worker = server.find_served.worker
    assert isinstance(worker, EngineProcess)
    return worker


def said(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each text of an answer with its name, without ids, and the numbers of tokens and log-probabilities."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from said(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from said(one, name)
    elif name in ("text", "content", "delta", "response", "finish_reason", "message", "code", "token_logprobs") or (
        name.endswith("_tokens")
    ):
        yield name, round(value, 3) if isinstance(value, float) else value


def streamed(server: LiveServer, path: str) -> str:
    answer = server.client.post(path, json={"stream": True, **STREAMS[path]}).text
    lines = [line.removeprefix("data:").strip() for line in answer.splitlines()]
    found = [one for line in lines if line.startswith("{") for _, one in said(json.loads(line))]
    text = "".join(one for one in found if isinstance(one, str))
    assert len(text) > 20, answer
    return text


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("path", STREAMS)
def test_each_dialect_streams_the_same(apart: LiveServer, together: LiveServer, path: str) -> None:
    assert streamed(apart, path) == streamed(together, path)


@pytest.mark.parametrize("kind", WHOLE)
def test_each_answer_is_the_same(apart: LiveServer, together: LiveServer, kind: str) -> None:
    path, body = WHOLE[kind]
    answers = [server.client.post(path, json={"temperature": 0, **body}) for server in (apart, together)]
    assert answers[0].status_code == answers[1].status_code
    assert list(said(answers[0].json())) == list(said(answers[1].json())) != []


def test_its_steps_are_counted_and_described_as_those_of_a_thread(apart: LiveServer, together: LiveServer) -> None:
    for server in (apart, together):
        assert server.generate(max_tokens=4).status_code == 200
        until(lambda server=server: server.idle)  # type: ignore[misc]
        info = server.client.get("/info").json()
        assert info["steps"]["native"] + info["steps"]["interpreter"] == info_steps(server) > 0
        assert server.metric("armature_step_age_seconds") == 0.0
    names = [
        {line.split("{")[0].split(" ")[0] for line in one.client.get("/metrics").text.splitlines()}
        for one in (apart, together)
    ]
    assert names[0] == names[1]
    described = [one.client.get("/info").json() for one in (apart, together)]
    assert [one["plan"].pop("engine_process")["value"] for one in described] == [True, False]
    assert described[0].keys() == described[1].keys() and described[0]["plan"] == described[1]["plan"]


def info_steps(server: LiveServer) -> float:
    phases = (server.metric("armature_step_seconds_count", phase=phase) for phase in ("prefill", "decode"))
    return sum(phases)


def open_stream(server: LiveServer, **body: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=PATIENCE)
    content = json.dumps({"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **body}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    opened.sendall(head.encode() + content)
    return opened


def test_what_leavers_asked_for_is_freed(apart: LiveServer) -> None:
    for _ in range(NUM_LEAVERS // 50):
        leavers = [open_stream(apart, max_tokens=100) for _ in range(50)]
        assert leavers[0].recv(16)
        for one in leavers:
            one.close()
    until(lambda: apart.idle)
    assert apart.generate(max_tokens=2).status_code == 200


def test_a_client_that_reads_a_byte_at_a_time_stops_nobody(apart: LiveServer) -> None:
    slow = open_stream(apart, max_tokens=100)
    read = [slow.recv(1) for _ in range(10)]
    assert apart.generate(max_tokens=20).status_code == 200
    slow.settimeout(PATIENCE)
    while not b"".join(read).endswith(b"0\r\n\r\n"):
        read.append(slow.recv(4096))
    slow.close()
    assert b"".join(read).count(b"data:") > 1


@pytest.mark.full
def test_the_end_of_an_engine_ends_its_requests_alone_and_it_is_started_again(
    apart: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(apart)
    monkeypatch.setattr(engine._delay, "seconds", 0.05)
    first = engine.pid
    assert first is not None
    begun = threading.Barrier(NUM_STREAMS + 1)

    def ask(_: int) -> list[str]:
        body = {"prompt": "Once upon", "max_tokens": 1_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{apart.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            found = [next(lines)]
            begun.wait(PATIENCE)
            return [*found, *lines]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = pool.map(ask, range(NUM_STREAMS))
        begun.wait(PATIENCE)
        os.kill(first, signal.SIGKILL)
        ends = [[line for line in lines if line.startswith("data: {")][-1] for lines in answers]
    assert all(json.loads(one.removeprefix("data: "))["error"]["code"] == "step_failed" for one in ends)
    assert apart.client.get("/healthz").status_code == 200
    waiting = apart.client.get("/readyz")
    assert waiting.status_code == 503 or engine.pid != first
    until(lambda: apart.client.get("/readyz").status_code == 200)
    assert engine.pid != first and apart.idle and not apart.fatal
    assert apart.generate(max_tokens=2).status_code == 200
    assert apart.metric("armature_step_age_seconds") == 0.0


def test_an_engine_that_cannot_be_started_again_yet_is_tried_until_it_can(
    apart: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, begin, num_failures = engine_of(apart), subprocess.Popen, itertools.count(1)
    errors = [OSError(errno.ENOMEM, "no memory"), RuntimeError("no thread")]

    def fail(*arguments: Any, **options: Any) -> None:
        raise errors[next(num_failures) % 2]

    monkeypatch.setattr(engine._delay, "seconds", 0.02)
    monkeypatch.setattr(engine_process, "MAX_FAILED_STARTS", 10**6)
    monkeypatch.setattr(subprocesses.subprocess, "Popen", fail)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    for reason in ("no memory", "no thread"):
        until(lambda reason=reason: reason in apart.client.get("/healthz").json().get("stage", ""))  # type: ignore[misc]
        assert apart.generate(max_tokens=2).status_code == 503
    monkeypatch.setattr(subprocesses.subprocess, "Popen", begin)
    until(lambda: apart.client.get("/readyz").status_code == 200)
    assert apart.client.get("/healthz").json() == {"status": "alive"}
    assert apart.generate(max_tokens=2).status_code == 200
    assert "could not be started ([Errno 12] no memory); it is started again in" in caplog.text


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if "armature-engine" in Path(f"/proc/{one}/cmdline").read_text()]


@pytest.mark.full
def test_the_engine_ends_with_its_server(tiny: Path) -> None:
    with server_process(tiny, "--engine-process", "on", "--calibrate", "off") as served:
        served.url()
        until(lambda: children(served.process.pid) != [])
        (engine,) = children(served.process.pid)
        served.process.kill()
        until(lambda: not is_running(engine))


@pytest.mark.full
def test_a_stop_drains_and_ends_both(tiny: Path) -> None:
    with server_process(tiny, "--engine-process", "on", "--calibrate", "off") as served:
        with httpx.Client(base_url=served.url(), timeout=PATIENCE) as client:
            engine = drained_engine(served, client)
        status, log = served.finish()
        assert status == 0 and not is_running(engine), log


def drained_engine(served: ServerProcess, client: httpx.Client) -> int:
    """Stop a server under a stream, as systemd does, and return its engine's process."""
    until(lambda: client.get("/readyz").status_code == 200)
    (engine,) = children(served.process.pid)
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in (engine, served.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert [*lines][-2:] == ["data: [DONE]", ""]
    return engine


def test_a_stop_while_loading_is_no_failure(tiny: Path) -> None:
    with starting(tiny, engine_process="on", calibrate="off") as server:
        until(lambda: engine_of(server).pid is not None)
        engine = engine_of(server).pid
        assert engine is not None
    until(lambda: not is_running(engine))
    assert not server.fatal


def test_an_engine_that_never_starts_ends_the_server(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "_MAIN", "import os; os._exit(3)")
    monkeypatch.setattr(subprocesses, "FIRST_DELAY_SECONDS", 0.01)
    with starting(tiny, engine_process="on", calibrate="off") as server:
        until(lambda: server.fatal != [])
    assert "status 3" in str(server.fatal[0])


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_ends_the_server_as_with_a_thread(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-4096:] = b"\xff" * 4096  # not finite
    weights.write_bytes(content)
    messages = []
    for where in ("on", "off"):
        with starting(copy, engine_process=where, calibrate="off") as server:
            until(lambda server=server: server.fatal != [])  # type: ignore[misc]
        messages.append((type(server.fatal[0]).__name__, str(server.fatal[0])))
    assert messages[0] == messages[1] and messages[0][0] == "CheckpointInvalid"


@pytest.mark.full
def test_embeddings_are_the_same() -> None:
    vectors = []
    for where in ("on", "off"):
        with live(DEMO_DIRECTORY.parent / "bert", calibrate="off", engine_process=where) as server:
            vectors.append(server.client.post("/v1/embeddings", json={"input": ["a text", "another"]}).json()["data"])
    assert vectors[0] == vectors[1]
