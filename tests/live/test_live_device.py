"""A whole server on the simulated device: it gives the same results as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.backends import selection
from app.hardware.probe.probe import probe
from app.server import prepare
from app.settings import DEMO_DIRECTORY
from picture_checkpoints import write_reader
from simulated_device import SimulatedDeviceBackend, with_gpu
from tests.live import live_server
from tests.live.live_server import LiveServer, live, starting, until
from tests.live.test_live_pictures import asked, data_url

PROMPTS = ["Once upon a time", "The little dog", "A girl named", "One day", "There was a", "Tom and his friend"]
SMALL = {"max_model_len": 256, "max_running_seqs": 8, "max_batch_tokens": 64, "kv_cache_bytes": 2**23}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "probe", with_gpu)
    monkeypatch.setattr(selection, "DEVICE_BACKENDS", {"cuda": SimulatedDeviceBackend})
    monkeypatch.setattr(
        live_server.Reins, "take", lambda reins, engine: engine
    )  # held reins would launch nothing ahead


@pytest.fixture
def server(on_device: None) -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, device="cuda", **SMALL) as started:
        yield started


def bodies() -> list[dict[str, Any]]:
    greedy = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in PROMPTS]
    drawn = [{**body, "temperature": 0.9, "top_p": 0.9, "seed": number} for number, body in enumerate(greedy)]
    return [
        *greedy,
        *drawn,
        {**greedy[0], "n": 3, "temperature": 0.7, "seed": 5},
        {**greedy[1], "repetition_penalty": 1.2},
    ]


def answered(server: LiveServer) -> list[Any]:
    """All at once, in the order of the bodies."""
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda body: server.client.post("/v1/completions", json={"model": "llama", **body}), bodies())
        )
    assert [each.status_code for each in found] == [200] * len(found), [each.text for each in found]
    return [[choice["text"] for choice in each.json()["choices"]] for each in found]


@pytest.mark.full
def test_it_says_what_a_processor_says(server: LiveServer) -> None:
    told = server.client.get("/info").json()["plan"]
    assert (told["device"]["value"], told["cuda_device"]["value"], told["compile"]["value"]) == ("cuda", 0, True)
    found = answered(server)
    assert 'device="cuda"' in next(
        line for line in server.client.get("/metrics").text.splitlines() if line.startswith("armature_info{")
    )
    server.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "probe", probe)
        with live(DEMO_DIRECTORY, device="cpu", **SMALL) as processor:
            assert found == answered(processor)


def test_clients_that_leave_lose_nothing(server: LiveServer) -> None:
    for prompt in PROMPTS:
        with server.client.stream(
            "POST", "/generate", json={"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        ) as answer:
            assert next(answer.iter_lines())
    until(lambda: server.idle)
    assert server.generate(max_tokens=8).json()["finish_reason"] in ("length", "stop")
    until(lambda: server.metric("armature_kv_cache_usage_ratio") == 0.0)


def test_overload_and_errors_are_those_of_any_server(server: LiveServer) -> None:
    assert server.generate(max_tokens=0).status_code == 400
    assert server.generate(prompt="word " * 5000).status_code == 400
    assert server.generate(max_tokens=4).status_code == 200


def test_a_device_that_fails_while_loading_names_a_way_out(
    on_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SimulatedDeviceBackend, "attention", broken)
    with starting(DEMO_DIRECTORY, device="cuda", **SMALL) as server:
        until(lambda: bool(server.fatal))
    assert "illegal memory access" in str(server.fatal[0])
    assert "loading on cuda failed; set device=cpu to serve on the processor instead" in caplog.text


def test_an_encoder_answers(on_device: None) -> None:
    texts = ["a dog barks", "the weather is fine today", "x"]
    found = []
    for device in ("cuda", "cpu"):
        with live(Path("bert"), device=device, max_batch_tokens=64, max_model_len=64) as server:
            answer = server.client.post("/v1/embeddings", json={"model": "bert", "input": texts})
            assert answer.status_code == 200, answer.text
            found.append([number for each in answer.json()["data"] for number in each["embedding"]])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.full
def test_pictures_are_read_as_on_a_cpu(on_device: None, tmp_path: Path) -> None:
    write_reader(tmp_path / "model", "SmolVLMForConditionalGeneration/llama")
    found = []
    for device in ("cpu", "cuda"):
        with live(tmp_path / "model", device=device, **SMALL) as server, ThreadPoolExecutor(4) as pool:
            bodies = [
                {"messages": asked(data_url(size=size)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                for size in ((60, 40), (20, 90))
            ]
            answers = list(
                pool.map(lambda body: server.client.post("/v1/chat/completions", json=body).json(), bodies * 2)
            )
            found.append([answer["choices"][0]["message"]["content"] for answer in answers])
            assert server.find_served.prepared_start.plan.placement.device == device
    assert found[0] == found[1] and len(set(found[0])) == 2
