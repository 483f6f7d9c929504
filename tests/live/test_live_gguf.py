"""A GGUF file is served like the checkpoint that it was made from: the same text, template and names."""

from __future__ import annotations

from pathlib import Path

from gguf_files import write_gguf
from tests.live.live_server import live

MESSAGES = [{"role": "user", "content": "the weather in the town, 中文"}]


def test_the_text_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    file, found = write_gguf(tmp_path, max_position_embeddings=128), []
    for model in (file, tmp_path / "exact"):
        with live(model, precision="fp32") as server:
            body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = server.client.post("/v1/chat/completions", json=body).json()
            found.append((answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]))
            assert answer["model"] == model.stem
    assert found[0] == found[1]
