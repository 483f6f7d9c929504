"""More than there is room for: a full queue, 500 clients at once, full KV memory, a step that fails, a scrape while the engine works."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

import pytest

from app.engine.worker import MAX_FAILED_STEPS
from tests.live.live_server import LiveServer, live, until
from tiny_checkpoints import write_checkpoint


def test_a_full_queue_refuses_with_a_time(tiny: Path) -> None:
    with live(tiny, max_waiting_requests=2, max_running_seqs=1) as server, ThreadPoolExecutor(8) as pool:
        server.reins.hold()
        running = pool.submit(server.generate, max_tokens=4)
        assert server.reins.reached.wait(60)
        waiting = [pool.submit(server.generate, max_tokens=4) for _ in range(2)]
        until(lambda: server.find_served.service.num_open == 3)
        for path, body in (("/generate", {"prompt": "x"}), ("/v1/completions", {"prompt": "x", "stream": True})):
            refused = server.client.post(path, json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
        server.reins.release()
        assert {future.result().status_code for future in [running, *waiting]} == {200}
        assert server.generate(max_tokens=2).status_code == 200


async def test_500_clients_at_once(shared: LiveServer) -> None:
    """Each on a connection of its own, all open before the first is answered."""
    place = urlparse(shared.url)
    content = json.dumps({"prompt": "Once upon", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    shared.reins.hold()
    callers = await asyncio.gather(*(asyncio.open_connection(place.hostname, place.port) for _ in range(500)))
    for _, writer in callers:
        writer.write(head.encode() + b"connection: close\r\n\r\n" + content)
    shared.reins.release()
    answers = [(await asyncio.wait_for(reader.read(), 60)).decode() for reader, _ in callers]
    for _, writer in callers:
        writer.close()
    served = [answer for answer in answers if answer.startswith("HTTP/1.1 200 ")]
    refused = [answer for answer in answers if answer.startswith("HTTP/1.1 429 ")]
    assert len(served) + len(refused) == 500
    assert served
    assert all('"finish_reason"' in answer for answer in served)
    assert all("retry-after: " in answer for answer in refused)
    until(lambda: shared.idle)
    assert shared.generate(max_tokens=2).status_code == 200


def test_full_kv_memory_makes_requests_wait_and_all_are_answered(tmp_path: Path) -> None:
    """Room for about one context and a half: sequences are preempted, and none is lost or changed."""
    tiny = write_checkpoint(tmp_path / "tiny")
    with live(tiny, kv_cache_bytes=96 * 1024, max_running_seqs=8) as server, ThreadPoolExecutor(12) as pool:
        capacity = server.find_served.service.snapshot.kv_capacity_tokens
        assert 0 < capacity < 8 * 100
        alone = [
            server.generate(prompt="a" * n, max_tokens=100, ignore_eos=True).json()["token_ids"] for n in range(1, 13)
        ]
        asked = [pool.submit(server.generate, prompt="a" * n, max_tokens=100, ignore_eos=True) for n in range(1, 13)]
        assert [future.result().json()["token_ids"] for future in asked] == alone
        until(lambda: server.idle)


def test_a_failing_step_is_its_requests_own(server: LiveServer) -> None:
    server.reins.faults.append(RuntimeError("secret of the device"))
    failed = server.generate(max_tokens=4)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "step_failed"
    assert "secret" not in failed.text
    assert server.generate(max_tokens=4).status_code == 200


def test_a_step_that_fails_under_a_stream_is_its_last_event(server: LiveServer) -> None:
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as told:
        lines = told.iter_lines()
        next(lines)
        server.reins.faults.append(RuntimeError("secret of the device"))
        rest = [line for line in lines if line]
    assert '"code":"step_failed"' in rest[-1]
    assert "[DONE]" not in "".join(rest)


def test_a_device_that_keeps_failing_ends_the_worker(tiny: Path) -> None:
    with live(tiny) as server:
        server.reins.faults += [RuntimeError("broken")] * (
            MAX_FAILED_STEPS + 1
        )  # and it cannot compute anything else either
        assert {server.generate(max_tokens=4).status_code for _ in range(MAX_FAILED_STEPS)} == {500}
        until(lambda: server.client.get("/healthz").status_code == 500)
        assert server.client.get("/readyz").status_code == 503
        assert server.generate(max_tokens=4).status_code == 503
        assert isinstance(server.fatal[0], RuntimeError)


@pytest.mark.full
def test_a_scrape_does_not_wait_for_a_prefill(demo: LiveServer) -> None:
    """The target is 50 ms while every core computes; the median says whether the design holds on a machine that others use too."""
    with ThreadPoolExecutor(4) as pool:
        prompts = [f"{number} " + "once upon a time " * 300 for number in range(8)]
        busy = [pool.submit(demo.client.post, "/generate", json={"prompt": text, "max_tokens": 1}) for text in prompts]
        until(lambda: demo.find_served.service.snapshot.num_running > 0)
        taken = []
        while not all(future.done() for future in busy):
            began = time.perf_counter()
            assert demo.client.get("/metrics").status_code == 200
            taken.append(time.perf_counter() - began)
        assert {future.result().status_code for future in busy} == {200}
    assert len(taken) >= 3
    assert statistics.median(taken) < 0.05, sorted(taken)


def test_a_template_that_looks_for_a_way_out(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    directory = write_checkpoint(tmp_path / "tiny")
    settings = directory / "tokenizer_config.json"
    text = settings.read_text()
    start = text.index('"chat_template": "') + len('"chat_template": "')
    settings.write_text(text[:start] + escape + text[text.index('",', start) :])
    with live(directory) as server:
        response = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 400
        assert "subclasses" not in response.text.lower() or "sandbox" in response.text
        assert server.generate(max_tokens=2).status_code == 200
