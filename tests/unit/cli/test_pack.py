"""`armature pack`: what it writes is what the next start takes, it says so in a line, and refuses where there is nothing to keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.cli import main
from app.engine.calibration import streaming
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import write_checkpoint


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    directory = write_checkpoint(tmp_path / "tiny")
    return ["--model", str(directory), "--cache-dir", str(tmp_path / "cache"), "--threads", "1"]


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_packing_says_what_became_of_it(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_surprise", lambda logits, following: 0.0)  # random weights predict nothing
    for done in ("written", "already complete"):
        assert main.main(["pack", "--precision", "int4", *flags]) == 0
        (file,) = (tmp_path / "cache" / "packs").glob("*.pack")
        line = capsys.readouterr().out
        assert re.fullmatch(
            rf"{re.escape(str(file))}: {done}, {file.stat().st_size:,} bytes in int4; "
            r"it raises perplexity by \d\.\d%, \d+\.\d s\n",
            line,
        )


def test_what_is_packed_at_each_start_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pack", "--precision", "fp32", *flags]) == 2
    assert "There is nothing to pack." in capsys.readouterr().err


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_where_nothing_can_be_kept_that_is_said(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert main.main(["pack", "--precision", "int8", *flags]) == 2
    assert "Packed weights cannot be written to" in capsys.readouterr().err


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_after_ctrl_c_nothing_half_written_is_left(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    assert main.main(["pack", "--precision", "int4", *flags]) == 130
    assert not [file for file in (tmp_path / "cache" / "packs").iterdir() if file.suffix != ".content"]
