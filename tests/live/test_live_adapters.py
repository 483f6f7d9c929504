"""A running server with LoRA adapters: each name gives the text of its merged model, also while others run and change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.live_server import LiveServer, live
from tiny_adapters import merge_adapter, write_adapter
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.full
NAMES = ("base", "law", "med", "poetry")


def text_of(server: LiveServer, name: str) -> str:
    body = {
        "model": name,
        "prompt": "Once upon a time there was",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return str(answer.json()["choices"][0]["text"])


def test_each_name_gives_the_text_of_its_merged_model(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=5)
    paths = {name: write_adapter(tmp_path / "root" / name, base, seed=seed) for seed, name in enumerate(NAMES[1:])}
    expected = {}
    for name in NAMES:
        alone = base if name == "base" else merge_adapter(base, paths[name], tmp_path / "merged" / name)
        with live(alone, served_model_name=(name,)) as server:
            expected[name] = text_of(server, name)
    assert len(set(expected.values())) == len(NAMES)
    listed = tuple(f"{name}={paths[name]}" for name in ("law", "med"))
    for number in (1, 2):  # the main one of several processes has the adapters that clients load
        with live(base, lora=listed, lora_root=tmp_path / "root", max_running_seqs=8, api_processes=number) as server:
            check_changes(server, expected, base)


def check_changes(server: LiveServer, expected: dict[str, str], base: Path) -> None:
    client = server.client
    added = client.post("/v1/load_lora_adapter", json={"lora_name": "poetry", "lora_path": "poetry"})
    assert added.status_code == 200, added.text
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            found = dict(zip(NAMES * 2, threads.map(lambda name: text_of(server, name), NAMES * 2), strict=True))
            assert found == expected
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "poetry"}).status_code == 200
    assert client.post("/v1/completions", json={"model": "poetry", "prompt": "a"}).status_code == 404
    swapped = client.post("/v1/load_lora_adapter", json={"lora_name": "poetry", "lora_path": "law"})
    assert swapped.status_code == 200, swapped.text
    assert text_of(server, "poetry") == expected["law"]  # keys and values of the first adapter are not used
    assert client.get("/info").json()["adapters"] == ["law", "med", "poetry"]
    refused = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(base)})
    assert refused.status_code == 400
    assert "below the server's lora_root" in refused.json()["error"]["message"]
