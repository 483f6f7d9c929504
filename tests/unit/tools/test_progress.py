"""The lines of an installation, at a terminal and in a log, and the programs that it runs."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest

from tools.progress import Failed, Phase, Progress


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("[3/15] Building C object CMakeFiles/kernels.dir/rows.c.o", "3 of 15 files"),
        ("[ 33%] Building C object CMakeFiles/kernels.dir/rows.c.o", "33%"),
        ("Collecting numpy==2.4.6 (from -r requirements/runtime-hashes.txt (line 28))", "numpy"),
        (
            "  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)",
            "downloading numpy-2.4.6, 16.9 MB",
        ),
        ("  Downloading https://a.b/c/torch-2.13.0%2Bcpu-cp311-none-any.whl (190 MB)", ""),
        (
            "  Downloading https://a.b/c/torch-2.13.0+cpu-cp311-none-any.whl (190 MB)",
            "downloading torch-2.13.0+cpu, 190 MB",
        ),
        ("Downloading torch (180.6MiB)", "downloading torch, 180.6MiB"),
        ("Installing collected packages: mpmath, uvloop", "unpacking"),
        ("Prepared 48 packages in 2.2s", "Prepared 48 packages"),
        ("WARNING: something", ""),
    ],
)
def test_what_programs_say_of_their_progress(line: str, detail: str) -> None:
    phase = Phase("packages")
    phase.hear(line)
    assert phase.detail == detail


def test_bytes_are_a_share_of_what_is_downloaded() -> None:
    phase = Phase("packages")
    for line in ("Downloading torch (180MiB)", "Progress 0 of 200", "Progress 50 of 200"):
        phase.hear(line)
    assert phase.detail == "downloading torch, 180MiB: 25%"


def test_a_phase_has_a_line_when_it_ends_and_others_while_it_runs() -> None:
    spoke = threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if "compiling" in text:
                spoke.set()
            return super().write(text)

    log = Log()
    with Progress(2, log, interval=0.01) as progress:
        with progress.phase("environment"):
            pass
        with progress.phase("native library") as phase:
            phase.detail = "compiling"
            assert spoke.wait(60)
            phase.result = "from a wheel"
    first, *between, last = log.getvalue().splitlines()
    assert first == "[1/2] environment: 0 s"
    assert all(line.endswith("s: native library (compiling)") for line in between)
    assert last.startswith("[2/2] native library: ") and last.endswith(" s, from a wheel")


def test_a_phase_that_fails_has_no_line() -> None:
    log = io.StringIO()
    with pytest.raises(Failed), Progress(1, log) as progress, progress.phase("packages") as phase:
        progress.run(phase, [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    assert log.getvalue() == ""


def test_a_program_that_fails_is_shown() -> None:
    with Progress(1, io.StringIO()) as progress, pytest.raises(Failed) as raised:
        progress.run(Phase("packages"), [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    said = str(raised.value).splitlines()
    assert said[0] == "why"
    assert said[1] == f"packages: {Path(sys.executable).name} ended with status 3; see its output above."


def test_what_still_runs_ends_with_the_installation() -> None:
    begun = threading.Event()

    class Heard(Phase):
        def hear(self, line: str) -> None:
            begun.set()

    def wait_for_ever() -> None:
        with pytest.raises(Failed):
            progress.run(Heard("compile"), [sys.executable, "-c", "print('begun'); import time; time.sleep(600)"])

    with Progress(1, io.StringIO()) as progress:
        thread = threading.Thread(target=wait_for_ever)
        thread.start()
        assert begun.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(Failed, match="interrupted"):
        progress.run(Phase("later"), [sys.executable, "-V"])
