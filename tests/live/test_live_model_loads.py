"""Models that are loaded on demand, unloaded, or cannot be loaded, beside others that serve."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.api import streaming
from app.server import models as registry_module
from app.server import subprocesses
from app.server.engine_process import EngineProcess
from tests.live.live_server import PATIENCE, until
from tests.live.several_models import LiveModels, several
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("checkpoints") / "embed")


@pytest.fixture(scope="module")
def shared_models(tiny: Path, embed: Path) -> Iterator[LiveModels]:
    with several({"tiny": tiny, "embed": embed}, model_control="on") as server:
        yield server


@pytest.fixture
def controlled(shared_models: LiveModels) -> LiveModels:
    """Two models that clients may load and unload, both ready."""
    shared_models.post("/v2/repository/models/tiny/load")
    until(lambda: shared_models.states() == {"tiny": "ready", "embed": "ready"})
    return shared_models


def on_demand(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": model, "load": "on-demand", **more}


def embeds(server: LiveModels, name: str, status: int = 200) -> dict[str, Any]:
    answer = server.post("/v1/embeddings", model=name, input="a")
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def test_the_first_request_loads_a_model_and_waits_for_it(tiny: Path, embed: Path) -> None:
    with several({"tiny": tiny, "embed": on_demand(embed)}) as server:
        assert server.states() == {"tiny": "ready", "embed": "unloaded"}
        listed = {one["id"]: one["status"]["value"] for one in server.client.get("/v1/models").json()["data"]}
        assert listed == {"tiny": "loaded", "embed": "unloaded"}
        assert [one["name"] for one in server.client.get("/api/ps").json()["models"]] == ["tiny"]
        answers: list[int] = []
        clients = [
            threading.Thread(target=lambda: answers.append(embeds(server, "embed")["usage"]["total_tokens"]))
            for _ in range(4)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(PATIENCE)
        assert len(answers) == 4
        assert server.states() == {"tiny": "ready", "embed": "ready"}


@pytest.mark.full
def test_a_client_whose_wait_would_be_too_long_is_told_when_to_come_back(tiny: Path, embed: Path) -> None:
    with several({"tiny": tiny, "embed": on_demand(embed, request_timeout_seconds=2.0)}) as server:
        (entry,) = server.registry.entries[1:]
        entry.load_seconds = 600.0  # as an earlier load took
        refused = server.post("/v1/embeddings", model="embed", input="a")
        assert refused.status_code == 503
        assert 590 <= int(refused.headers["retry-after"]) <= 601
        until(lambda: server.states()["embed"] == "ready")  # the load goes on
        embeds(server, "embed")


STREAMS: dict[str, tuple[dict[str, Any], str]] = {  # with the comments or the white space that come first
    "/v1/completions": ({"prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}, r"(: .+\n\n)+"),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 3, "temperature": 0, "stream": True}, r"(: .+\n\n)+"),
    "/api/generate": ({"prompt": "a", "options": {"num_predict": 3, "temperature": 0}}, " +"),
}


@pytest.mark.full
def test_a_stream_has_signs_of_life_while_its_model_is_loading(tiny: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(streaming, "COMMENT_SECONDS", 0.05)
    with several({"late": on_demand(tiny)}) as server, ThreadPoolExecutor(len(STREAMS)) as pool:
        for path, (text, headers) in zip(STREAMS, pool.map(early, [server] * len(STREAMS), STREAMS), strict=True):
            found = re.match(STREAMS[path][1], text)
            assert found is not None, text
            now, usual = early(server, path)
            assert not re.match(STREAMS[path][1], now)
            assert same(text[found.end() :]) == same(now)
            assert usual.keys() - headers.keys() <= {"server-timing", "request-id"}  # not known yet


@pytest.mark.full
def test_a_stream_whose_model_cannot_be_loaded_ends_with_the_error(
    tmp_path: Path, tiny: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(streaming, "COMMENT_SECONDS", 0.01)
    with several({"spare": on_demand(tiny), "absent": on_demand(tmp_path / "absent")}) as server:
        loading, loop = server.registry._loading, server.registry._loop
        for path, (body, _) in STREAMS.items():
            server.registry.entries[1].retry_at = 0.0
            asyncio.run_coroutine_threadsafe(loading.acquire(), loop).result(PATIENCE)  # as if another one were loading
            with server.client.stream("POST", path, json={**body, "model": "absent"}) as answer:
                first = next(content := answer.iter_text())
                loop.call_soon_threadsafe(loading.release)
                text = first + "".join(content)
            assert (answer.status_code, str(tmp_path / "absent") in text) == (200, True)
            assert "error" in json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert server.registry.entries[1].num_waiting == 0


def early(server: LiveModels, path: str) -> tuple[str, dict[str, str]]:
    answer = server.post(path, **STREAMS[path][0], model="late")
    assert answer.status_code == 200
    return answer.text, dict(answer.headers)


def same(text: str) -> str:
    """The events without ids and times."""
    return re.sub(r'"(id|created|created_at|\w+_duration)":("[^"]*"|\d+)', "", text)


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_leaves_the_others_serving(tiny: Path, tmp_path: Path) -> None:
    broken = write_checkpoint(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with several({"tiny": tiny, "broken": broken, "absent": tmp_path / "absent"}) as server:
        assert server.client.get("/readyz").status_code == 200
        assert server.states() == {"tiny": "ready", "broken": "failed", "absent": "failed"}
        assert server.client.get("/healthz").status_code == 200
        assert server.post("/v1/completions", model="tiny", prompt="a", max_tokens=1).status_code == 200
        refused = server.post("/v1/completions", model="broken", prompt="a")
        assert refused.status_code == 503
        assert "tokenizer.json" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        absent = server.post("/v1/completions", model="absent", prompt="a")
        assert (absent.status_code, str(tmp_path / "absent") in absent.text) == (503, True)
        status = {one["id"]: one["status"] for one in server.client.get("/v1/models").json()["data"]}
        assert status["broken"] == {"value": "unloaded", "failed": True}
        assert not server.fatal


@pytest.mark.full
def test_the_process_ends_if_no_model_can_be_loaded(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        (folder / "tokenizer.json").write_text("{")
    with several(dict(zip(("one", "two"), folders, strict=True))) as server:
        assert len(server.fatal) == 1
        assert server.client.get("/healthz").status_code == 500


@pytest.mark.full
def test_a_failed_model_is_loaded_again_once_it_can_be(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(registry_module, "FIRST_RETRY_SECONDS", 0.05)
    late = tmp_path / "late"
    with several({"tiny": tiny, "late": late}) as server:
        assert server.states()["late"] == "failed"
        write_checkpoint(late)
        until(lambda: server.post("/v1/completions", model="late", prompt="a", max_tokens=1).status_code == 200)


@pytest.mark.full
def test_unloading_waits_for_open_requests_and_the_next_one_loads_again(controlled: LiveModels) -> None:
    server, before = controlled, completion_tokens(controlled)
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True},
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        unloading = threading.Thread(target=server.post, args=("/models/unload",), kwargs={"model": "tiny"})
        unloading.start()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    unloading.join(PATIENCE)
    assert server.states() == {"tiny": "unloaded", "embed": "ready"}
    assert completion_tokens(server) == before + 200
    assert server.post("/v1/completions", model="tiny", prompt="a", max_tokens=1).status_code == 200
    assert completion_tokens(server) == before + 201  # the counters go on
    assert 'armature_ready{model="tiny"} 1.0' in server.client.get("/metrics").text


def completion_tokens(server: LiveModels) -> float:
    text = server.client.get("/metrics").text
    found = re.search(r'^armature_tokens_total\{kind="completion",model="tiny"\} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.full
@pytest.mark.parametrize("dialect", ["oip", "llama_cpp", "ollama"])
def test_clients_load_and_unload_by_each_dialect(controlled: LiveModels, dialect: str) -> None:
    server = controlled

    def control(loads: bool) -> Any:
        verb = "load" if loads else "unload"
        if dialect == "oip":
            return server.post(f"/v2/repository/models/tiny/{verb}")
        if dialect == "llama_cpp":
            return server.post(f"/models/{verb}", model="tiny")
        return server.post("/api/generate", model="tiny", **({} if loads else {"keep_alive": 0}), stream=False)

    for loads, state, code in ((False, "unloaded", "UNAVAILABLE"), (True, "ready", "READY")):
        answer = control(loads)
        assert answer.status_code == 200, answer.text
        if dialect == "ollama" and not loads:
            assert answer.json()["done_reason"] == "unload"
        until(lambda state=state: server.states()["tiny"] == state)  # type: ignore[misc]
        index = server.post("/v2/repository/index").json()
        assert index[0] == {"name": "tiny", "version": "1", "state": code, "reason": "" if loads else "unloaded"}
    assert server.post("/v2/repository/models/absent/load").status_code == 404
    assert server.post("/models/load", model="absent").status_code == 404
    files = {"parameters": {"config": "{}", "file:1/model.onnx": "AAAA"}}
    assert server.post("/v2/repository/models/tiny/load", **files).status_code == 400


@pytest.mark.full
def test_keep_alive_is_a_time_without_requests(controlled: LiveModels) -> None:
    server = controlled
    for value in ("10m", 600, "600"):
        server.post("/api/generate", model="tiny", prompt="a", keep_alive=value, stream=False)
        assert 590 < server.registry.entries[0].timer.when() - server.run(server.registry._loop.time) <= 600.001
    server.post("/api/generate", model="tiny", prompt="a", keep_alive=-1, stream=False)
    assert server.registry.entries[0].timer is None
    wrong = server.post("/api/generate", model="tiny", prompt="a", keep_alive="soon", stream=False)
    assert (wrong.status_code, "keep_alive" in wrong.json()["error"]) == (400, True)
    server.post("/api/generate", model="tiny", prompt="a", keep_alive="1ms", stream=False)
    until(lambda: server.states()["tiny"] == "unloaded")


@pytest.mark.full
def test_a_model_is_unloaded_after_its_idle_time(tiny: Path, embed: Path) -> None:
    with several({"tiny": tiny, "embed": {"model": embed, "unload_after_seconds": 0.05}}) as server:
        until(lambda: server.states()["embed"] == "unloaded")
        embeds(server, "embed")
        until(lambda: server.states()["embed"] == "unloaded")
        assert server.states()["tiny"] == "ready"


@pytest.mark.full
def test_the_least_recently_used_one_is_unloaded_if_memory_is_short(embed: Path, monkeypatch: Any) -> None:
    with several({name: on_demand(embed) for name in ("one", "two", "three")}) as server:
        assert server.client.get("/readyz").status_code == 200  # each can be loaded
        embeds(server, "one")
        taken = server.registry.entries[0].taken
        assert taken is not None
        real = registry_module.memory_wish

        def scarce(*arguments: Any) -> Any:  # room for two and a half
            wish = real(*arguments)
            return type(wish)(wish.device, taken.total * 5 // 2, wish.fixed, wish.least, wish.total)

        monkeypatch.setattr(registry_module, "memory_wish", scarce)
        embeds(server, "two")
        embeds(server, "one")
        embeds(server, "three")
        assert server.states() == {"one": "ready", "two": "unloaded", "three": "ready"}
        embeds(server, "two")
        assert server.states() == {"one": "unloaded", "two": "ready", "three": "ready"}


@pytest.mark.full
def test_an_engine_that_is_killed_is_started_again_while_others_serve(
    tiny: Path, embed: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(subprocesses, "FIRST_DELAY_SECONDS", 0.05)
    with several({"tiny": tiny, "embed": embed}) as server:
        engine = server.registry.entries[0].serving.worker
        assert isinstance(engine, EngineProcess) and engine.pid is not None
        killed = engine.pid
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.states()["tiny"] == "loading")
        embeds(server, "embed")
        until(lambda: server.states()["tiny"] == "ready")
        assert engine.pid != killed
        assert server.post("/v1/completions", model="tiny", prompt="a", max_tokens=1).status_code == 200
        assert not server.fatal


@pytest.mark.full
def test_the_server_stops_while_a_model_is_loading_and_requests_wait(tiny: Path) -> None:
    with several({"tiny": tiny, "late": on_demand(tiny)}) as server:
        held = asyncio.run_coroutine_threadsafe(server.registry._loading.acquire(), server.registry._loop)
        assert held.result(PATIENCE)  # as if another model were loading
        statuses: list[int] = []
        client = threading.Thread(
            target=lambda: statuses.append(server.post("/v1/completions", model="late", prompt="a").status_code)
        )
        client.start()
        until(lambda: server.registry.entries[1].state == "loading")
        server.server.should_exit = True
        server.server.config.timeout_graceful_shutdown = 0
        client.join(PATIENCE)
        assert statuses == [503]
