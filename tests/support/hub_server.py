"""A server on loopback with the routes of Hugging Face's hub that fetching a model uses, and with faults on demand.

As on the hub, small files are answered at once and have Git's SHA-1 as ETag; weights are redirected to another origin,
where they can be read from any byte on, and have their SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = (".safetensors", ".gguf", ".bin", ".pt2")  # what the hub keeps apart from Git


@dataclass
class HostedModel:
    """The files of one model, at one commit."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    token: str = ""  # needed to see it at all

    def is_large(self, path: str) -> bool:
        return path.endswith(LARGE)

    def etag(self, path: str) -> str:
        content = self.files[path]
        if self.is_large(path):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """What is hosted, what was requested, and which faults to make."""

    models: dict[str, HostedModel] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "METHOD path", with " from N" if a range was asked for
    breaks_after: dict[str, int] = field(default_factory=dict)  # path: the connection ends once after so many bytes
    damaged: set[str] = field(default_factory=set)  # paths that arrive with other bytes of the same number
    short: set[str] = field(default_factory=set)  # paths whose stated size is larger than what arrives
    gates: dict[str, threading.Event] = field(default_factory=dict)  # path: wait for this in the middle of its bytes
    reached: threading.Event = field(default_factory=threading.Event)  # such a middle was reached
    status: int = 0  # answer everything with this status
    url: str = ""
    cdn_url: str = ""

    def host(self, name: str, directory: Path, **options: Any) -> HostedModel:
        files = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        self.models[name] = HostedModel(files, **options)
        return self.models[name]

    def fetched(self) -> list[str]:
        """The paths of the files whose content was sent, sorted, each once."""
        sent = [one.split(" ")[1] for one in self.requests if one.startswith("GET ")]
        return sorted(
            {path.split("/", 5)[5] for path in sent if path.count("/") >= 5 and path.split("/")[3] == "resolve"}
        )


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    servers = [_listen(hub, _HubRoutes), _listen(hub, _StorageRoutes)]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        for gate in hub.gates.values():
            gate.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def _listen(hub: Hub, routes: type[_Routes]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (routes,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


class _Routes(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Nothing on the test's stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        start = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        self.hub.requests.append(f"{self.command} {path}" + (f" from {start}" if start else ""))
        if self.hub.status:
            return self.send({}, self.hub.status)
        return self.route(path)

    def route(self, path: str) -> None:
        raise NotImplementedError

    def refuse(self, status: int, code: str = "", message: str = "") -> None:
        self.send({"X-Error-Code": code, "X-Error-Message": message}, status)

    def send(self, headers: dict[str, str], status: int = 200, body: bytes = b"", size: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class _HubRoutes(_Routes):
    def route(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/models":
            author = parse_qs(urlsplit(self.path).query)["author"][0]
            return self._json([{"id": one} for one in self.hub.models if one.startswith(f"{author}/")])
        in_api = parts[:2] == ["api", "models"]
        owner, name, verb, *rest = [*(parts[2:] if in_api else parts), "", "", ""]
        model = self.hub.models.get(f"{owner}/{name}")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given == "expired":
            return self.refuse(401, message="Invalid credentials in Authorization header")
        if model is None or model.token not in ("", given):
            return self.refuse(404 if given else 401, "RepoNotFound", "Repository not found")
        rest = [each for each in rest if each]
        revision = rest[0] if rest else "main"
        if verb == "revision":
            revision = "/".join(rest)
        if revision not in (*model.revisions, model.commit):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if in_api and verb in ("revision", ""):
            return self._json({"id": f"{owner}/{name}", "sha": model.commit, "siblings": [], "private": False})
        if in_api and verb == "tree":
            return self._json([_tree_entry(model, path) for path in sorted(model.files)])
        return self._resolve(model, "/".join(rest[1:]))

    def _json(self, value: Any) -> None:
        self.send({"Content-Type": "application/json"}, body=json.dumps(value).encode())

    def _resolve(self, model: HostedModel, path: str) -> None:
        if model.gated:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted")
        if path not in model.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        etag, size = model.etag(path), len(model.files[path])
        headers = {"X-Repo-Commit": model.commit}
        if not model.is_large(path):
            content = _damage(model.files[path]) if path in self.hub.damaged else model.files[path]
            return self.send({**headers, "ETag": f'"{etag}"'}, body=content)
        stated = str(size + 1 if path in self.hub.short else size)
        location = f"{self.hub.cdn_url}/{etag}/{path}"
        return self.send({**headers, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": stated, "Location": location}, 302)


class _StorageRoutes(_Routes):
    """The storage of large files. The path has their hash and name."""

    def route(self, path: str) -> None:
        assert "Authorization" not in self.headers, "the token left the hub"
        _, digest, name = path.split("/", 2)
        model = next(each for each in self.hub.models.values() if name in each.files and each.etag(name) == digest)
        content = _damage(model.files[name]) if name in self.hub.damaged else model.files[name]
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0] or 0)
        headers = {"Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        size = len(body)
        limit = self.hub.breaks_after.pop(name, None)
        if limit is not None:
            self.close_connection = True
            return self.send(headers, 206 if asked else 200, body[:limit], size)
        half = size // 2 if name in self.hub.gates else size
        self.send(headers, 206 if asked else 200, body[:half], size)
        if half < size:
            self.wfile.flush()
            self.hub.reached.set()
            self.hub.gates[name].wait(60)
            with contextlib.suppress(ConnectionError):  # the client was stopped
                self.wfile.write(body[half:])
        return None


def _damage(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _tree_entry(model: HostedModel, path: str) -> dict[str, Any]:
    size = len(model.files[path])
    entry: dict[str, Any] = {"type": "file", "oid": "b" * 40, "size": size, "path": path}
    if model.is_large(path):
        entry["lfs"] = {"oid": model.etag(path), "size": size, "pointerSize": 134}
    return entry


@contextlib.contextmanager
def client_of(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let huggingface_hub in this process use this hub and an empty cache, as its variables would have at its import."""
    from huggingface_hub import close_session, constants
    from huggingface_hub.utils import _http

    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "no-token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(_http, "_HUB_ORIGINS", frozenset())
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield cache
    close_session()
