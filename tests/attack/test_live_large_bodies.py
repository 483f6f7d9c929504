"""A real server: bodies of 16 MiB are answered, and its memory does not grow with their texts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import DEMO_DIRECTORY
from tests.attack.large_bodies import JSON, bodies, resident_bytes
from tests.attack.soak import BAD_BODIES
from tests.live.live_server import ServerProcess, until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of another process's memory is read from /proc"),
]
MEGABYTE = 2**20
SIZE = 16 * MEGABYTE - 200
# A prompt that is far too long is weighed while it arrives: some of it is held, and what the allocator keeps.
MOST_PROMPT_BYTES = 32 * MEGABYTE
# Copies of the body while it is received, as bytes and as a text, and what the allocator keeps. Its tokens took 2 GB.
MOST_BYTES = 200 * MEGABYTE

MOST_RESIDENT_BYTES = 160 * MEGABYTE  # after all kinds of bodies of 16 MiB; it is about 100


def peak_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def serving(model: Path) -> Generator[tuple[httpx.Client, int]]:
    process = ServerProcess(model, "--precision", "fp32")
    try:
        with httpx.Client(base_url=process.url(), timeout=120) as client:
            until(lambda: client.get("/readyz").status_code == 200)
            yield client, process.process.pid
    finally:
        process.process.terminate()
        process.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[httpx.Client, int]]:
    yield from serving(DEMO_DIRECTORY)


@pytest.fixture(scope="module")
def bert() -> Iterator[tuple[httpx.Client, int]]:
    yield from serving(DEMO_DIRECTORY.parent / "bert")


def test_the_first_use_of_everything_grows_memory_little() -> None:
    """The first attack on a fresh server took 242 MB that stayed: buffers, pools and what the allocator keeps."""
    with contextlib.closing(serving(DEMO_DIRECTORY)) as servers:
        client, process_id = next(servers)
        few: dict[str, Any] = {"prompt": "Once", "max_tokens": 20}
        assert client.post("/generate", json=few).status_code == 200
        before = resident_bytes(process_id)
        for path, body in bodies().values():
            client.post(path, content=body, headers=JSON)
        for body in BAD_BODIES:
            assert client.post("/generate", content=body, headers=JSON).status_code < 500
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: client.post("/generate", json=few).status_code, range(64)))
        assert set(answers) <= {200, 429}
        assert resident_bytes(process_id) - before < MOST_RESIDENT_BYTES


@pytest.mark.cases(ci=3)
@pytest.mark.parametrize("text", ["a", "the fox said ", "é"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_prompt_of_16_megabytes(llama: tuple[httpx.Client, int], text: str, path: str) -> None:
    client, process_id = llama
    long = text * ((SIZE - 1_000) // len(text.encode()))
    prompt = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    body = json.dumps({**prompt, "max_tokens": 2}, ensure_ascii=False)
    assert client.post("/generate", json={"prompt": "Once", "max_tokens": 1}).status_code == 200
    before = peak_bytes(process_id)
    response = client.post(path, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert peak_bytes(process_id) - before < MOST_PROMPT_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a b " * 3_900_000},
        {"content": "a b " * 3_900_000, "with_pieces": True},
        {"prompt": "a b " * 3_900_000, "return_token_strs": True},
    ],
    ids=["ids", "pieces", "strings"],
)
def test_the_tokens_of_16_megabytes_are_not_listed(llama: tuple[httpx.Client, int], body: dict[str, Any]) -> None:
    """Eight million tokens held the event loop for seconds, and took half a gigabyte."""
    client, process_id = llama
    assert client.post("/tokenize", json={**body, "prompt": "a", "content": None}).status_code == 200
    before = peak_bytes(process_id)
    response = client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    assert ("262144 tokens" if list(body) == ["prompt"] else "1048576 characters") in response.text
    assert peak_bytes(process_id) - before < MOST_BYTES


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize("text", ["!", "the fox said ", "9 "])
def test_texts_of_16_megabytes_for_an_encoder(bert: tuple[httpx.Client, int], text: str) -> None:
    client, process_id = bert
    assert client.post("/encode", json={"inputs": "Once"}).status_code == 200
    long = text * ((SIZE - 1_000) // len(text))
    before = peak_bytes(process_id)
    refused = client.post("/v1/embeddings", json={"input": long})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    truncated = client.post("/v1/embeddings", json={"input": long, "truncate": True})
    assert truncated.status_code == 200
    assert peak_bytes(process_id) - before < MOST_BYTES
