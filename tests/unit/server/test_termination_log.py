"""Failures that leave a reason in a pod's termination message, and its format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.errors import CheckpointInvalid, PlanImpossible
from app.server import termination_log
from app.server.termination_log import MAX_BYTES, TerminationMessage, describe_exception, write_reason


@pytest.fixture(autouse=True)
def _as_a_pod_has_it(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message.write_text("of the container before, which was longer than what follows " * 3)
    monkeypatch.setattr(termination_log, "FILE", message)
    monkeypatch.setattr(logging, "basicConfig", lambda **words: None)  # pytest's own stays


@pytest.fixture
def message(tmp_path: Path) -> Path:
    return tmp_path / "termination-log"


def serving(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], Any], command: str = "serve") -> int:
    monkeypatch.setattr(main, "COMMANDS", {**main.COMMANDS, command: lambda arguments: fails()})
    return main.main([command])


def raising(error: BaseException) -> Callable[[], Any]:
    def fails() -> None:
        raise error

    return fails


def test_a_refusal_is_one_line(
    message: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serving(monkeypatch, raising(PlanImpossible("too\nlarge  by half"))) == 2
    assert message.read_text() == "too large by half"
    assert "armature: too" in capsys.readouterr().err


def test_what_nobody_foresaw_is_named_and_not_swallowed(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Input/output"):
        serving(monkeypatch, raising(OSError(5, "Input/output error")))
    assert message.read_text() == "OSError: [Errno 5] Input/output error"
    assert describe_exception(MemoryError()) == "MemoryError"


def test_a_flag_that_is_none_is_reported_without_its_value(message: Path) -> None:
    assert main.main(["serve", "--api-key=sk-secret"]) == 2
    assert message.read_text().startswith("armature serve: there is no flag --api-key. Did you mean --api-keys?")


def test_a_setting_that_is_wrong(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_API_KEYS", '["sk-secret"')
    assert main.main(["serve"]) == 2
    assert "api_keys" in message.read_text()
    assert "sk-secret" not in message.read_text()
    monkeypatch.setenv("ARMATURE_API_KEYS", '{"sk-secret": 1}')
    assert main.main(["serve", "--threads=none"]) == 2
    assert "threads (--threads, ARMATURE_THREADS)" in message.read_text()
    assert "sk-secret" not in message.read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_stop_is_no_reason(message: Path, error: BaseException) -> None:
    before = message.read_text()
    with pytest.raises(type(error)), TerminationMessage():
        raise error
    assert message.read_text() == before


def test_what_is_tried_beside_a_server_is_no_reason_for_its_end(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = message.read_text()
    assert serving(monkeypatch, raising(CheckpointInvalid("cut short")), command="pack") == 2
    assert message.read_text() == before


def test_a_long_reason_is_cut_between_letters(message: Path) -> None:
    write_reason("x" + "é" * MAX_BYTES)
    assert len(message.read_bytes()) == MAX_BYTES - 1
    assert set(message.read_text()) == {"x", "é"}


def test_nothing_is_made_where_nothing_is(message: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message.unlink()
    write_reason("a reason")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(termination_log, "FILE", tmp_path)
    write_reason("a folder is no file")
