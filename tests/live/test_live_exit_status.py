"""Exit status and termination message of real processes, as a pod reports them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import PATIENCE, until

# `armature serve`, with a termination message in a place where a test may look; a fault may be planted before it begins.
SCRIPT = """
import sys
from pathlib import Path
from app.server import termination_log as termination
termination.FILE = Path(sys.argv.pop(1))
{fault}
from app.__main__ import run
sys.exit(run())
"""
BREAK_LOADING = """
def broken(*arguments):
    raise RuntimeError("the device\\nis gone")
import app.engine.worker
from app.server.engine_host import EngineHost
EngineHost.build = broken
"""
NO_THREADS = """
import threading
def refused(thread):
    raise RuntimeError("can't start new thread")
from app.engine.worker import Worker
Worker.start = refused
Worker.join = lambda *arguments: None
"""


class Pod:
    """A process with a termination message, empty at first, as the kubelet makes it."""

    def __init__(self, folder: Path, model: Path, *flags: str, fault: str = "") -> None:
        self.message = folder / "termination-log"
        self.message.touch()
        serve = ["serve", "--model", str(model), "--port", "0", "--threads", "1", *flags]
        command = [sys.executable, "-P", "-c", SCRIPT.format(fault=fault), str(self.message), *serve]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended(self) -> tuple[int, str]:
        """Its status and what it left."""
        _, self.said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, self.message.read_text()


@contextlib.contextmanager
def pod(folder: Path, model: Path, *flags: str, fault: str = "") -> Iterator[Pod]:
    started = Pod(folder, model, *flags, fault=fault)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@pytest.mark.full
def test_without_its_volume(tmp_path: Path) -> None:
    with pod(tmp_path, tmp_path / "models" / "llama") as started:
        status, message = started.ended()
    assert status == 2
    assert message.startswith(
        f"Checkpoint {tmp_path}/models/llama does not exist, nor does {tmp_path}/models: is a volume"
    )
    assert started.said.splitlines()[-1] == f"armature: {message}"


@pytest.mark.full
def test_without_its_secret(tmp_path: Path, tiny: Path) -> None:
    with pod(tmp_path, tiny, "--api-key-file", str(tmp_path / "keys")) as started:
        assert started.ended() == (2, f"api_key_file {tmp_path}/keys does not exist. Is the secret there, and mounted?")


def test_when_the_worker_dies(tmp_path: Path, tiny: Path) -> None:
    with pod(tmp_path, tiny, fault=BREAK_LOADING) as started:
        status, message = started.ended()
    assert status == 1
    assert message.startswith("The worker has failed, so no request can be served: RuntimeError: the device is gone.")
    assert "Traceback" in started.said


@pytest.mark.full
def test_when_no_thread_can_be_started(tmp_path: Path, tiny: Path) -> None:
    with pod(tmp_path, tiny, fault=NO_THREADS) as started:
        status, message = started.ended()
    assert status == 1
    assert message.startswith("The server could not start its threads")


@pytest.mark.full
def test_a_stop_is_no_failure(tmp_path: Path, tiny: Path) -> None:
    """While it loads; it has looked at /healthz before."""
    with pod(tmp_path, tiny) as started:
        assert started.process.stdout is not None
        url = started.process.stdout.readline().split()[-1]
        assert httpx.get(f"{url}/healthz").status_code == 200
        started.process.send_signal(signal.SIGTERM)
        assert started.ended() == (0, "")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_stop_is_handled_from_the_first_moment(tmp_path: Path, tiny: Path) -> None:
    """A container's first process never hears of a signal that it has no receiver for; 143 says that there was one."""
    with pod(tmp_path, tiny) as started:
        until(lambda: receives(started.process.pid, signal.SIGTERM))
        started.process.send_signal(signal.SIGTERM)
        assert started.ended() == (143, "")
        assert "listening" not in started.said


def receives(pid: int, number: int) -> bool:
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
