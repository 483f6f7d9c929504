"""A scripted Armature server for `bench compare`: its information, counters, steps, and answers to every kind of load."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WATTS = 40.0
PACE_SECONDS = 0.001  # between some of an answer's tokens, so that not all arrive at once
WORD_TOKENS = 2  # around a text, as a BERT has them


@dataclass
class ScriptedMachine:
    """`on_request` is told each request for an answer, by number, and may set `dead`: then nobody is answered any more.

    `refuse`: by the number of texts or rows of a request, whether it is refused.
    """

    kind: str = "decoder"
    context: int = 256
    addresses: int = 2
    version: str = "1.2.3"
    architecture: str = "arm64"
    outputs: tuple[str, ...] = ("embedding",)
    on_request: Callable[[int], None] = lambda number: None
    send_error: Callable[[int], bool] = lambda number: False
    has_steps: bool = True
    calibration: Any = field(default_factory=lambda: {"measurements": {"fallback": ""}})
    speed: Any = None
    counters: Callable[[], dict[str, float]] = dict
    api_key: str | None = None
    dead: bool = False
    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def info(self) -> dict[str, Any]:
        plan = {"max_model_len": self.context, "max_running_seqs": self.addresses, "precision": "int4"}
        return {
            "version": self.version,
            "model": {"name": "tiny", "kind": self.kind, "num_parameters": 1000},
            "facts": {
                "cpu": {"name": "Fast(R) CPU 9000 Processor @ 9 GHz", "product": None},
                "kernel": os.uname().release,
                "architecture": self.architecture,
            },
            "plan": {name: {"value": value, "reason": "Said."} for name, value in plan.items()},
            "calibration": self.calibration,
            "speed": self.speed,
        }

    def metrics(self) -> str:
        told = {
            'armature_energy_joules_total{source="rapl"}': WATTS * time.monotonic(),
            "process_cpu_seconds_total": 0.0,
        }
        return "# HELP\n" + "".join(f"{name} {value}\n" for name, value in {**told, **self.counters()}.items())

    def steps(self, after: int) -> dict[str, Any]:
        """One every ten milliseconds since the world began; every second one is slow."""
        now = int(time.time() * 100)
        numbers = range(max(after, now - 50), now)[:20]
        columns = {
            "at": [number / 100 for number in numbers],
            "seconds": [0.0012345678] * len(numbers),
            "phase": ["decode"] * len(numbers),
            "tokens": [2] * len(numbers),
            "cause": ["page_fault" if number % 2 else "" for number in numbers],
        }
        return {"next": numbers[-1] + 1 if numbers else now, "dropped": 0, "clock": time.time(), "steps": columns}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        texts = body.get("inputs") or body.get("input") or []
        if path == "/tokenize":
            return 200, {"token_ids": list(range(40))}
        rows = texts[0]["shape"][0] if path.endswith("/infer") else len(texts)
        if self.send_error(rows):
            return 400, {"error": {"message": f"{rows} are too many"}}
        usage = {"prompt_tokens": sum(len(text.split()) + WORD_TOKENS for text in texts if isinstance(text, str))}
        if path == "/encode":
            return 200, {"embeddings": [[0.5, 0.5]] * rows, "usage": usage}
        if path == "/v1/classify":
            return 200, {"data": [{"predictions": [{"label": "good", "score": 1.0}]}] * rows, "usage": usage}
        return 200, {"outputs": [{"name": "output", "shape": [rows, 1], "datatype": "FP32", "data": [0.5] * rows}]}


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    machine: ScriptedMachine

    def log_message(self, *words: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        machine = self.machine
        path, _, query = self.path.partition("?")
        machine.paths.append(path)
        if machine.dead:
            self.close_connection = True
            return
        if path == "/metrics":
            self._plain(200, machine.metrics())
        elif machine.api_key and self.headers["Authorization"] != f"Bearer {machine.api_key}" and path != "/readyz":
            self._plain(401, "{}")
        elif path == "/info/steps" and machine.has_steps:
            self._plain(200, json.dumps(machine.steps(int(query.removeprefix("after=")))))
        elif path in ("/readyz", "/info"):
            self._plain(200, json.dumps(machine.info()))
        elif path == "/v2/models/tiny":
            inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
            self._plain(200, json.dumps({"inputs": inputs, "outputs": [{"name": name} for name in machine.outputs]}))
        else:
            self._plain(404, "{}")

    def do_POST(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was interrupted leaves in the middle of an answer
            self._post()

    def _post(self) -> None:
        machine = self.machine
        content = self.rfile.read(int(self.headers["Content-Length"]))
        head = int(self.headers["Inference-Header-Content-Length"] or len(content))
        body = json.loads(content[:head])
        if self.path != "/tokenize":
            with machine.lock:
                machine.bodies.append(body)
                number = len(machine.bodies)
            machine.on_request(number)
        if machine.dead:
            self.close_connection = True
        elif self.path == "/generate":
            self._stream(body)
        else:
            status, answer = machine.answer(self.path, body)
            self._plain(status, json.dumps(answer))

    def _plain(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(body["max_tokens"]):
            self._prefill_budget(b'data: {"text": "a", "token_ids": [5]}\n\n')
            if number % 32 == 0:
                time.sleep(PACE_SECONDS)
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": body["max_tokens"]}
        self._prefill_budget(f"data: {json.dumps({'text': '', 'token_ids': [], 'usage': usage})}\n\n".encode())
        self._prefill_budget(b"")

    def _prefill_budget(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))


@contextlib.contextmanager
def running(machine: ScriptedMachine) -> Iterator[ScriptedMachine]:
    """On a free port of this machine."""
    answers = type("Answers", (_Answers,), {"machine": machine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    machine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield machine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
