"""The figures of a newcomer's wait, from a scripted session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools.measure import first_text
from tools.measure.first_text import Session


def chunk(**delta: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n".encode()


def test_the_first_text_is_the_first_that_is_not_empty() -> None:
    stream = [
        chunk(role="assistant", content=""),
        b"\n",
        chunk(content="Once"),
        chunk(content=" upon"),
        b"data: [DONE]\n",
    ]
    assert first_text.first_text(stream) == "Once"
    assert first_text.first_text([b"data: [DONE]\n"]) == ""


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ([(5.0, "[1/4] environment: 5 s"), (19.0, "..."), (33.0, "first text: Once")], 0),
        ([(5.0, "[1/4] environment: 5 s"), (33.0, "first text: Once")], 1),
        ([(float(second), "...") for second in range(0, 101, 10)] + [(101.0, "first text: Once")], 1),
    ],
)
def test_a_long_wait_and_a_long_silence_miss_their_targets(
    said: list[tuple[float, str]], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(said=said)
    assert first_text.report(session, 100.0) == status
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["seconds"] == said[-1][0]
    assert figures["longest_silence_seconds"] == session.longest_silence()


def test_a_newcomer_has_neither_caches_nor_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_THREADS", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = first_text.environment(tmp_path, tmp_path / "wheels")
    assert [name for name in found if name.startswith("ARMATURE_")] == ["ARMATURE_WHEELS"]
    assert all(
        Path(found[name]).is_relative_to(tmp_path) for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME")
    )
    assert found["PATH"] == os.environ["PATH"] and "PYTHONDONTWRITEBYTECODE" not in found
