"""A running server with a draft model says what it says without one, and reports what the draft model drafted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.server.prepare import prepare
from app.settings import Settings
from tests.live.live_server import LiveServer, live, until
from tiny_checkpoints import write_checkpoint

PROMPTS = tuple(f"{word} upon a time there was" for word in ("Once", "Twice", "Thrice", "Never"))
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def texts_of(server: LiveServer) -> list[Any]:
    bodies = [{"temperature": 0}, {"seed": 7, "n": 2}, {"seed": 9, "top_k": 5}, {"seed": 3, "guided_json": SCHEMA}]

    def ask(body: dict[str, Any], prompt: str) -> list[str]:
        # The text does not depend on the batch with deterministic on, and neither do the tokens.
        answer = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 120, **body})
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, bodies * 2, PROMPTS * 2))


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("draft_seed", [5, 6])
def test_a_draft_model_changes_no_text(tmp_path: Path, draft_seed: int) -> None:
    served = write_checkpoint(tmp_path / "served", seed=5)
    draft = write_checkpoint(tmp_path / "draft", seed=draft_seed, vocab_size=300)
    with live(served, deterministic="on") as server:
        expected = texts_of(server)
        assert set(server.client.get("/info").json()["speculation"]) == {"ngram", "grammar"}
    with live(served, deterministic="on", draft_model=draft) as server:
        assert texts_of(server) == expected
        info = server.client.get("/info").json()
        assert info["plan"]["draft_model"]["value"] == str(draft)
        drafted = info["speculation"]["draft_model"]
        assert drafted["draft_tokens"] > 0
        assert 0 <= drafted["accepted_tokens"] <= drafted["draft_tokens"]


@pytest.mark.full
def test_another_vocabulary_ends_the_start(tmp_path: Path) -> None:
    served, draft = write_checkpoint(tmp_path / "served"), write_checkpoint(tmp_path / "draft", seed=1)
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace('"A":', '"swapped":'))
    server = LiveServer(served, draft_model=draft).start()
    try:
        until(lambda: bool(server.fatal))
        assert isinstance(server.fatal[0], CheckpointInvalid)
        assert "has another vocabulary" in server.fatal[0].message
    finally:
        server.stop()


def test_bad_settings_end_it_before(tmp_path: Path) -> None:
    served = write_checkpoint(tmp_path / "served")
    with pytest.raises(CheckpointInvalid, match="nowhere"):
        prepare(Settings(model=served, draft_model=tmp_path / "nowhere"))
