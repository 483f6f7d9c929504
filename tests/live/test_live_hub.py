"""Models by their names on the hub, as people type them: the commands, and a server that fetches while it starts."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hub_server import Hub, hub_server
from tests.live.live_server import PATIENCE, server_process, until


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has a model, and this process's children as its clients, with an empty cache."""
    with hub_server() as served:
        served.host("org/tiny", tiny)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


def run(*words: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "app", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.full
def test_pull_list_and_rm(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    status, said, log = run("pull", "org/tiny")
    assert status == 0
    assert said.startswith("org/tiny at aaaaaaaaaaaa: 5 files, ") and said.endswith(
        f"in {folder}/snapshots/{'a' * 40}\n"
    )
    assert log.splitlines()[0].startswith("armature pull: fetching org/tiny, ")
    assert "http" not in log  # no addresses of requests, which may have signatures
    assert not [one for one in hub.requests if "agent" in one]  # no telemetry
    status, said, _ = run("list")
    assert status == 0 and "org/tiny  main, aaaaaaaaaaaa" in said and said.split()[-1] == "yes"
    status, said, log = run("rm", "org/tiny")
    assert (status, said) == (2, "")
    assert (
        log.splitlines()[-1]
        == "armature: armature rm asks before it removes files, and there is no terminal: give --yes."
    )
    status, _, log = run("rm", "org/tinny", "--yes")
    assert status == 2 and "org/tinny is not in the hub's cache" in log and "Did you mean org/tiny?" in log
    assert run("rm", "org/tiny", "--yes")[:2] == (0, f"removed 1 revision from {tmp_path}/home/hub\n")
    assert not folder.exists()
    assert json.loads(run("list", "--json")[1]) == {"cache": f"{tmp_path}/home/hub", "models": []}


@pytest.mark.full
def test_list_says_why_a_model_cannot_be_served(hub: Hub, tmp_path: Path) -> None:
    assert run("pull", "org/tiny")[0] == 0
    next((tmp_path / "home").rglob("tokenizer.json")).unlink()
    listed = json.loads(run("list", "--json")[1])["models"]
    assert [(one["name"], one["servable"], one["refusal"]) for one in listed] == [
        ("org/tiny", False, "files are missing; armature pull org/tiny fetches them")
    ]


@pytest.mark.full
def test_rm_asks_on_a_terminal(hub: Hub, tmp_path: Path) -> None:
    assert run("pull", "org/tiny")[0] == 0
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    for answer, status, is_there in ((b"n\n", 1, True), (b"y\n", 0, False)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        command = [sys.executable, "-m", "app", "rm", "org/tiny"]
        ended = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=PATIENCE)
        os.close(ours)
        os.close(theirs)
        assert (ended.returncode, folder.exists()) == (status, is_there)
        assert "Remove 1 revision with their files? [y/N]" in ended.stderr


@pytest.mark.cases(test=1)
@pytest.mark.parametrize(
    "variable, value", [("ARMATURE_OFFLINE", "on"), ("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1")]
)
def test_offline_asks_nobody(hub: Hub, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    words = ("pull", "org/tiny") if variable == "ARMATURE_OFFLINE" else ("serve", "--model", "org/tiny")
    status, _, log = run(*words)
    assert status == 2
    assert "Nothing is fetched, since offline is on (ARMATURE_OFFLINE or HF_HUB_OFFLINE)." in log
    assert hub.requests == []


def test_ctrl_c_leaves_no_half_file(hub: Hub, tmp_path: Path) -> None:
    hub.gates["model.safetensors"] = threading.Event()
    with subprocess.Popen([sys.executable, "-m", "app", "pull", "org/tiny"], stderr=subprocess.PIPE) as pulling:
        assert hub.reached.wait(PATIENCE)
        pulling.send_signal(signal.SIGINT)
        _, log = pulling.communicate(timeout=PATIENCE)
    assert pulling.returncode == 130
    assert b"Traceback" not in log
    assert not list((tmp_path / "home").rglob("*.incomplete"))
    assert next((tmp_path / "home").rglob("tokenizer.json")).is_file()


@pytest.mark.full
def test_a_server_fetches_its_model_with_its_port_open(hub: Hub) -> None:
    hub.gates["model.safetensors"] = gate = threading.Event()
    with server_process(Path("org/tiny")) as server, httpx.Client(base_url=server.url(), timeout=PATIENCE) as client:
        assert hub.reached.wait(PATIENCE)
        until(lambda: "progress" in client.get("/readyz").json())
        loading = client.get("/readyz")
        assert loading.status_code == 503
        assert loading.json()["progress"]["phase"] == "fetching org/tiny"
        assert loading.json()["stage"].startswith("fetching org/tiny, ")
        assert client.get("/healthz").status_code == 200
        assert client.get("/info").json()["model"] == {"name": "org/tiny"}
        assert 'armature_info{device="cpu"' in client.get("/metrics").text
        gate.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["org/tiny"]
        assert client.get("/v1/models/org/tiny").status_code == 200
        assert client.get("/info").json()["model"]["architecture"] == "LlamaForCausalLM"
        body = {"model": "org/tiny", "prompt": "Once", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.full
def test_a_stop_while_the_model_is_fetched_is_no_failure(hub: Hub) -> None:
    hub.gates["model.safetensors"] = gate = threading.Event()
    with server_process(Path("org/tiny")) as server:
        server.url()
        assert hub.reached.wait(PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        gate.set()
        assert server.finish()[0] == 0


@pytest.mark.full
def test_a_server_ends_with_the_reason_why_its_model_cannot_be_fetched(hub: Hub) -> None:
    with server_process(Path("org/none")) as server:
        status, log = server.finish()
    assert status == 2
    assert log.splitlines()[-1].startswith(
        "armature: org/none is no directory here, and the hub has no model of this name"
    )
