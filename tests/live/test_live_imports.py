"""Nothing is imported while requests are served: an import takes time of the event loop, and needs files to be opened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.live_server import PATIENCE, until
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

pytestmark = pytest.mark.full

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PAGES = (
    "/",
    "/docs",
    "/openapi.json",
    "/metrics",
    "/info",
    "/info/steps",
    "/healthz",
    "/v1/models",
    "/v2",
    "/props",
    "/nope",
)
DECODER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True}),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "n": 2, "logit_bias": {"5": 3}, "temperature": 1, "top_p": 0.5},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "prompt_logprobs": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "response_format": {"type": "json_object"}}),
    ("/generate", {"prompt": "a", "max_tokens": 4, "beam_width": 2}),
    ("/tokenize", {"prompt": "a"}),
    ("/v1/completions", {"prompt": 5, "what": 1}),
]
ENCODER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/embed", {"inputs": "a"}),
    ("/v1/completions", {"prompt": "a"}),
]


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_everything_is_imported_before_the_server_is_ready(kind: str, tmp_path: Path) -> None:
    model = (write_checkpoint if kind == "decoder" else write_encoder)(tmp_path / "model")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", "0", "--threads", "1"]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening on ").strip()
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            until(lambda: client.get("/readyz").status_code == 200)
            ready = log.stat().st_size
            for path in PAGES:
                client.get(path)
            for path, body in DECODER if kind == "decoder" else ENCODER:
                assert client.post(path, json=body).status_code < 500
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        served = log.read_bytes()[ready:].decode()
        imported = [line for line in served.splitlines() if line.startswith("import time:")]
        assert imported == []
    finally:
        process.kill()
        process.communicate()
