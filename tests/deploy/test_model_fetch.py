"""The init container's script: a checkpoint that is copied whole, or is not there."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from external_tools import run

K8S = Path(__file__).resolve().parents[2] / "k8s"
SCRIPT = Path(__file__).resolve().parents[2] / "k8s" / "components" / "model-fetch" / "claim" / "fetch_model.py"
FILES = {"config.json": b"{}", "model.safetensors": b"\x00" * 3_000_000, "1_Pooling/config.json": b"{}"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fetching = load()
Fetch = Callable[[Path | str], int]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As a hub's cache has it: names are links to blobs."""
    folder, blobs = tmp_path / "source", tmp_path / "blobs"
    blobs.mkdir()
    for number, (name, content) in enumerate(FILES.items()):
        (blobs / str(number)).write_bytes(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blobs / str(number))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "tiny"


@pytest.fixture
def fetch(target: Path) -> Fetch:
    return lambda source: fetching.main(
        {"MODEL_SOURCE": str(source), "ARMATURE_MODEL": str(target), "HOSTNAME": "pod-1"}
    )


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def packed(files: dict[str, bytes], mode: str = "w:gz", below: str = "tiny/") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(below + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@contextmanager
def store(body: bytes, promised: int | None = None) -> Iterator[str]:
    """An object store with one object; it may promise more bytes than it has, and then breaks off."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(promised or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/tiny.tar"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_folder_is_copied_with_what_its_links_point_to(fetch: Fetch, checkpoint: Path, target: Path) -> None:
    assert fetch(checkpoint) == 0
    assert content_of(target) == FILES
    assert not any(file.is_symlink() for file in target.rglob("*"))
    assert [entry.name for entry in target.parent.iterdir()] == ["tiny"]


def test_what_is_there_is_left_alone(fetch: Fetch, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.mkdir()
    assert fetch("/no/such/folder") == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_comes_out_of_an_object_store(fetch: Fetch, target: Path, mode: str) -> None:
    with store(packed(FILES, mode)) as url:
        assert fetch(url) == 0
    assert content_of(target) == FILES


def test_an_archive_may_have_its_files_at_the_top(fetch: Fetch, target: Path) -> None:
    with store(packed(FILES, below="")) as url:
        assert fetch(url) == 0
    assert content_of(target) == FILES


# An archive without compression that ends between two files looks whole: only the promised length tells.
BROKEN = {
    "compressed": (packed(FILES)[:-2000], None),
    "inside_a_file": (packed(FILES, "w")[:1_000_000], None),
    "between_files": (packed({"config.json": b"{}"}, "w")[:1024], 5_000_000),
    "no_archive": (b"<html>not found</html>", None),
    "empty": (packed({}), None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_half_a_download_is_no_model(fetch: Fetch, target: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    body, promised = BROKEN[name]
    with store(body, promised) as url:
        assert fetch(url) == 1
    assert list(target.parent.iterdir()) == []
    told = capsys.readouterr().err
    assert told.startswith(f"model-fetch: {url} could not be copied to {target}: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_an_archive_writes_nothing_outside_its_folder(fetch: Fetch, target: Path, name: str) -> None:
    with store(packed({name: b"x"}, below="")) as url:
        assert fetch(url) == 1
    assert not list(target.parent.parent.rglob("outside"))


def test_a_missing_folder_is_named(fetch: Fetch, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch("/no/such/folder") == 1
    assert "/no/such/folder is no folder here" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []


def test_sums_are_held_to_where_there_are_some(fetch: Fetch, checkpoint: Path, target: Path) -> None:
    right = hashlib.sha256(FILES["config.json"]).hexdigest()
    (checkpoint / "SHA256SUMS").write_text(f"{right}  config.json\n{'0' * 64}  model.safetensors\n")
    assert fetch(checkpoint) == 1
    assert not target.exists()
    (checkpoint / "SHA256SUMS").write_text(f"{right} *config.json\n")
    assert fetch(checkpoint) == 0


def test_pods_with_one_claim_copy_at_once_and_one_of_them_is_first(
    checkpoint: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    publish = fetching.publish

    def at_once(*places: Path) -> Any:
        both.wait(10)
        return publish(*places)

    monkeypatch.setattr(fetching, "publish", at_once)
    told: list[str] = []
    pods = [
        threading.Thread(target=lambda name=name: told.append(fetching.fetch(str(checkpoint), target, name)))
        for name in "ab"
    ]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join()
    assert sum("another pod was first" in words for words in told) == 1
    assert content_of(target) == FILES
    assert [entry.name for entry in target.parent.iterdir()] == ["tiny"]


def test_a_pod_that_is_asked_to_stop_leaves_nothing_half_done(target: Path) -> None:
    arrived = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(packed(FILES, "w")[:600])
            self.wfile.flush()
            arrived.set()
            self.rfile.read()  # until the client has gone

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    environment = {"MODEL_SOURCE": f"http://127.0.0.1:{server.server_port}/", "ARMATURE_MODEL": str(target)}
    pod = subprocess.Popen([sys.executable, "-P", SCRIPT], env=environment, stderr=subprocess.PIPE)
    try:
        assert arrived.wait(20)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(20) == 143
    finally:
        pod.kill()
        pod.communicate()
        server.shutdown()
        server.server_close()
        thread.join()
    assert list(target.parent.iterdir()) == []


def test_settings_that_are_missing_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetching.main({"MODEL_SOURCE": "/model"}) == 2
    assert "ARMATURE_MODEL" in capsys.readouterr().err


# ---- from a store that speaks S3 -------------------------------------------------------------------------------------

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def from_store(tmp_path: Path, target: Path) -> Run:
    """The init container's shell with an rclone that copies from a folder; `then` is what it does afterwards."""
    stub = tmp_path / "bin" / "rclone"
    stub.parent.mkdir()
    component = yaml.safe_load((K8S / "components" / "model-fetch" / "s3" / "deployment.yaml").read_text())
    (container,) = component["spec"]["template"]["spec"]["initContainers"]

    def fetch_it(source: str, then: str = "") -> subprocess.CompletedProcess[str]:
        stub.write_text(f'#!/bin/sh\n[ "$1" = sync ] && cp -r "{tmp_path}/${{2#s3:}}" "$3" || exit 3\n{then}\n')
        stub.chmod(0o755)
        environment = {
            "PATH": f"{stub.parent}:/usr/bin:/bin",
            "MODEL_SOURCE": source,
            "ARMATURE_MODEL": str(target),
            "HOSTNAME": "pod-1",
        }
        return run(container["command"], env={name: value for name, value in environment.items() if value})

    return fetch_it


def test_a_bucket_is_copied_once(from_store: Run, checkpoint: Path, target: Path) -> None:
    assert checkpoint.name == "source"
    told = from_store("s3:source")
    assert (told.returncode, told.stderr) == (0, "")
    assert content_of(target) == FILES
    assert [entry.name for entry in target.parent.iterdir()] == ["tiny"]
    again = from_store("s3:nothing/there")
    assert (again.returncode, "there already" in again.stdout) == (0, True)


@pytest.mark.parametrize(("source", "then"), [("s3:nothing/there", ""), ("s3:source", "exit 1"), ("s3:empty", "")])
def test_a_bucket_that_fails_or_is_empty_is_no_model(
    from_store: Run, checkpoint: Path, tmp_path: Path, target: Path, source: str, then: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert from_store(source, then).returncode != 0
    assert not target.exists()


def test_a_buckets_sums_are_held_to(from_store: Run, checkpoint: Path, target: Path) -> None:
    (checkpoint / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n")
    assert from_store("s3:source").returncode != 0
    assert not target.exists()


def test_another_pod_may_be_first_with_a_bucket(from_store: Run, checkpoint: Path, target: Path) -> None:
    told = from_store("s3:source", then=f"mkdir {target} && touch {target}/config.json")
    assert (told.returncode, "another pod was first" in told.stdout) == (0, True)
    assert [entry.name for entry in target.parent.iterdir()] == ["tiny"]
    assert [file.name for file in target.iterdir()] == ["config.json"]


def test_a_bucket_that_is_not_named_is_asked_for(from_store: Run) -> None:
    told = from_store("")
    assert (told.returncode != 0, "MODEL_SOURCE" in told.stderr) == (True, True)
