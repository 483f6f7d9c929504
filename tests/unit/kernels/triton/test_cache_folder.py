"""The folder of compiled GPU kernels: code is loaded from it, so other users must not be able to write to it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from armature_kernels.triton.support import secure_cache_folder


def kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    secure_cache_folder()
    return Path(os.environ["TRITON_CACHE_DIR"])


def test_a_new_folder_is_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "triton"
    assert kept(monkeypatch, folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert kept(monkeypatch, folder) == folder, "at the next start too"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_one_that_others_may_write_to_is_not_used(
    mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "triton"
    folder.mkdir()
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        found = kept(monkeypatch, folder)
    assert found != folder and found.is_dir() and stat.S_IMODE(found.stat().st_mode) == 0o700
    assert f"kept for this process alone: {folder} may be written by others" in caplog.text
    found.rmdir()


def test_one_that_cannot_be_made_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = kept(monkeypatch, tmp_path / "file" / "triton")
    assert found.is_dir() and "cannot be made" in caplog.text
    found.rmdir()


def test_who_says_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    secure_cache_folder()
    assert "TRITON_CACHE_DIR" not in os.environ
