"""A small HTTP server with scripted answers, for the commands that talk to a server in a terminal."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ScriptedServer:
    """`answers`: by path, the status and the body; a list of the body is sent as server-sent events.

    A list that ends with None breaks off there. `asked` and `keys` record the bodies and the keys of the requests.
    """

    answers: dict[str, tuple[int, Any]]
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""
    asked: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def chatting(*events: Any, **others: tuple[int, Any]) -> ScriptedServer:
    """Return a server of the model `fox` that answers each chat with these events."""
    paths = {
        "/v1/models": (200, {"data": [{"id": "fox"}]}),
        "/readyz": (200, {"status": "ready"}),
        "/v1/chat/completions": (200, list(events)),
    }
    return ScriptedServer(paths | others)


@contextlib.contextmanager
def running(script: ScriptedServer) -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.keys.append(self.headers["authorization"])
            self._answer(self.path.partition("?")[0])

        def do_POST(self) -> None:
            script.keys.append(self.headers["authorization"])
            script.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer(self.path)

        def _answer(self, path: str) -> None:
            status, body = script.answers.get(path, (404, {"detail": "Not Found"}))
            self.send_response(status)
            for name, value in script.headers.items():
                self.send_header(name, value)
            if isinstance(body, list):
                self.end_headers()
                for event in body:
                    if event is None:
                        return
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
                return
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
