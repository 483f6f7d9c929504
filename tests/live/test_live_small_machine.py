"""A server in a small place: cache volumes that are full or read-only, little memory, a quarter of a core; all of them real."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.hardware.decision import Measurements, TrialTimes
from tests.live.live_server import PATIENCE, live, until
from tools.peers.quota import CGROUPS, Quota

root_only = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts and control groups are root's to make"
)


# ---- cache volumes -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def volume(options: str) -> Iterator[Path]:
    """A file system in memory, of its own size."""
    with tempfile.TemporaryDirectory(prefix="armature-volume-") as name:
        folder = Path(name)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", name], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)  # weights may still be mapped


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine is doing, there is a calibration to be kept."""
    trial = TrialTimes("int8", 1, {1: 0.002, 8: 0.003}, {64: 0.01, 512: 0.07}, 1e-8, 10**6, 2e6)
    found = Measurements(5e10, {"int8": 8e11}, (trial,), seconds=0.1)
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", lambda what, budget, report: found)


def served_with(cache: Path, tiny: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of a start that would keep both a calibration and a pack, and then serves."""
    with (
        caplog.at_level(logging.WARNING, logger="app"),
        live(tiny, precision="int8", cache_dir=cache, calibrate="on") as server,
    ):
        assert server.generate(max_tokens=2).status_code == 200
    return [
        record.getMessage()
        for record in caplog.records
        if "kept" in record.getMessage() or "cannot" in record.getMessage()
    ]


@root_only
@pytest.mark.usefixtures("measured")
def test_a_cache_volume_that_is_full(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with volume("size=64k") as cache:
        (cache / "somebody").write_bytes(b"x" * 2**16)
        (warning,) = served_with(cache, tiny, caplog)
        assert f"cannot be kept in {cache} (No space left on device): serving goes on" in warning
        assert not [file for file in cache.rglob("*") if file.name.startswith(".partial-")]


@root_only
@pytest.mark.usefixtures("measured")
def test_a_cache_volume_that_is_read_only(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with volume("ro,size=64k") as cache:
        (warning,) = served_with(cache, tiny, caplog)
    assert f"cannot be kept in {cache} (Read-only file system): serving goes on" in warning


@root_only
def test_a_cache_that_was_filled_serves_read_only(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an image or a snapshot may bring one: nothing has to be written, so nothing is wrong."""
    with volume("size=16m") as cache:
        with live(tiny, precision="int8", cache_dir=cache):
            pass
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        with caplog.at_level(logging.WARNING, logger="app"), live(tiny, precision="int8", cache_dir=cache):
            pass
    assert caplog.messages == []


# ---- control groups ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def confined(group: Path, model: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`armature serve` whose every thread is in the group from the beginning."""
    enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    serve = ["-P", "-m", "app", "serve", "--model", str(model), "--port", "0", *flags]
    command = [sys.executable, "-c", enter, str(group / "cgroup.procs"), *serve]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    version = 1 if (CGROUPS / "memory").is_dir() else 2
    top, limit = (CGROUPS / "memory", "memory.limit_in_bytes") if version == 1 else (CGROUPS, "memory.max")
    group = Quota(top / f"armature-{os.getpid()}-memory")
    try:
        group.folder.mkdir()
        (group.folder / limit).write_text(str(size))
    except OSError as error:
        pytest.skip(f"no control group with a limit can be made: {error}")
    try:
        yield group.folder
    finally:
        group.remove()


@pytest.mark.full
@root_only
def test_too_little_memory_is_refused_before_anything_is_read(tiny: Path) -> None:
    with memory_limit(320 * 2**20) as group, confined(group, tiny, "--calibrate", "on") as process:
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
    *before, last = said.splitlines()
    assert last.startswith("armature: The model does not fit: ")
    assert "of the control group's limit of 320 MiB; the rest is in use" in last
    assert not [line for line in before if "torch" in line or "calibrat" in line]


@pytest.mark.full
@root_only
def test_a_quarter_of_a_core_serves(tiny: Path) -> None:
    try:
        quota = Quota.make("quarter", 0.25)
    except SystemExit as error:
        pytest.skip(str(error))
    try:
        with confined(quota.folder, tiny) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            assert httpx.get(f"{url}/healthz", timeout=PATIENCE).status_code == 200
            until(lambda: httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200)
            plan = httpx.get(f"{url}/info", timeout=PATIENCE).json()["plan"]
            names = ("threads", "interop_threads", "tokenizer_threads", "http_threads")
            assert [plan[name]["value"] for name in names] == [1, 1, 1, 1]
            assert "The CPU quota is 0.25 cores" in plan["threads"]["reason"]
            assert (
                httpx.post(f"{url}/generate", json={"prompt": "Once", "max_tokens": 2}, timeout=PATIENCE).status_code
                == 200
            )
    finally:
        quota.remove()
