"""Cache files: one message if nothing can be kept, and the names of files that others could write."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.weights import cache_file
from app.weights.cache_file import FileUnusable, atomic_write, differences, log_not_kept, open_trusted

FULL = OSError(28, "No space left on device")


def test_one_warning_whatever_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_not_kept(tmp_path / "calibration" / "a.json", "what was measured", FULL)
        log_not_kept(tmp_path / "packs" / "b.pack", "what was packed", FULL)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.messages[0] == (
        f"what was measured cannot be kept in {tmp_path} (No space left on device): serving goes on, and the next start makes it again"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="root is somebody else for a moment")
@pytest.mark.parametrize(("closed", "raised"), [("folder", FileNotFoundError), ("file", FileUnusable)])
def test_a_closed_folder_holds_nothing_for_us(tmp_path: Path, closed: str, raised: type[Exception]) -> None:
    """It is told when something is to be kept there; a file of which nobody may say what is in it is told at once."""
    folder = Path("/tmp") / f"armature-{os.getpid()}-closed"
    folder.mkdir()
    try:
        (folder / "a.pack").write_bytes(b"x")
        (folder / "a.pack").chmod(0o600)
        folder.chmod(0o700 if closed == "folder" else 0o755)
        os.seteuid(65534)
        with pytest.raises(raised):
            open_trusted(folder / "a.pack")
    finally:
        os.seteuid(0)
        (folder / "a.pack").unlink()
        folder.rmdir()


def test_what_is_for_others_is_reported_by_name() -> None:
    ours = {"checkpoint": "c", "architecture": "x86_64", "version": "0.1.0"}
    others = [ours | {"architecture": "arm64"}, ours | {"version": "0.0.9"}]
    assert differences(ours, others) == "architecture, version"
    assert differences(ours, []) == ""


WRITER = """
import sys, time
from pathlib import Path
from app.weights.cache_file import atomic_write
with atomic_write(Path(sys.argv[1])) as stream:
    stream.write(b"half")
    print("half", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_file_is_there_completely_or_not_at_all(
    tmp_path: Path, unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not unnamed:
        monkeypatch.delattr(cache_file.os, "O_TMPFILE", raising=False)
    target = tmp_path / "packs" / "a.pack"
    for content in (b"first", b"second"):
        with atomic_write(target) as stream:
            stream.write(content)
            assert not target.exists() or target.read_bytes() == b"first"
        assert target.read_bytes() == content and target.stat().st_mode & 0o777 == 0o644
    with pytest.raises(KeyboardInterrupt), atomic_write(target) as stream:
        stream.write(b"third")
        raise KeyboardInterrupt
    assert [file.name for file in target.parent.iterdir()] == ["a.pack"] and target.read_bytes() == b"second"


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="a file without a name is Linux's")
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.pack")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
