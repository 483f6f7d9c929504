"""Files of the image: Dockerfiles, build context, locks, and the health check against real servers."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from app.cli.parser import setting_rows
from external_tools import ROOT, run, tool
from tests.live.live_server import LiveServer, live
from tiny_checkpoints import write_checkpoint
from tools.install import TORCH, TORCH_CPU
from tools.lock import BUILD_ONLY, LOCKS, Lock
from tools.sbom import read_lock

DOCKERFILES = ("Dockerfile", "docker/check.Dockerfile")
HEALTHCHECK = ROOT / "docker" / "healthcheck.py"
# What a checkout has beside what is committed: none of it belongs into an image.
MADE_HERE = (
    ".git/config",
    ".venv/bin/python",
    "build/native/x.o",
    "dist/x.whl",
    "armature_kernels/libarmature.so",
    "app/__pycache__/cli.pyc",
)


def test_hadolint_finds_nothing() -> None:
    told = run([tool("hadolint"), *(ROOT / each for each in DOCKERFILES)])
    assert (told.returncode, told.stdout) == (0, "")


def test_the_image_sets_what_are_settings() -> None:
    named = set(re.findall(r"^ +(ARMATURE_\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert named == {"ARMATURE_HOST", "ARMATURE_OFFLINE", "ARMATURE_CACHE_DIR"}
    assert named <= {row.variable for row in setting_rows()}


def test_the_wheel_is_made_of_what_is_let_in() -> None:
    """Each COPY finds its sources, and nothing is sent to the builder that no COPY asks for."""
    text = (ROOT / "Dockerfile").read_text()
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    sources = [source for copy in copies for source in copy]
    kept = set(filter(let_in(ROOT / ".dockerignore"), tracked()))
    for source in sources:
        assert any(path == source or path.startswith(f"{source}/") for path in kept), source
    assert kept == {path for path in tracked() if any(path == each or path.startswith(f"{each}/") for each in sources)}


def test_the_check_has_all_that_is_committed() -> None:
    into = let_in(ROOT / "docker" / "check.Dockerfile.dockerignore")
    assert [path for path in tracked() if not into(path)] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_was_made_here_stays_here(dockerfile: str) -> None:
    ignored = ROOT / (".dockerignore" if dockerfile == "Dockerfile" else f"{dockerfile}.dockerignore")
    assert list(filter(let_in(ignored), MADE_HERE)) == []


def tracked() -> list[str]:
    """Every committed file; skips where this is no checkout."""
    listed = run([tool("git"), "-C", ROOT, "ls-files"])
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return listed.stdout.splitlines()


def let_in(ignore: Path) -> Callable[[str], bool]:
    """What a .dockerignore of ours means: the last line that names a path, or a folder above it, decides."""
    lines = [line for line in ignore.read_text().splitlines() if line and not line.startswith("#")]
    rules = [(line.startswith("!"), pattern_of(line.lstrip("!"))) for line in lines]

    def kept(path: str) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        return next((into for into, pattern in reversed(rules) if any(map(pattern.fullmatch, above))), True)

    return kept


def pattern_of(line: str) -> re.Pattern[str]:
    """`*` is part of a name, `**/` any number of folders, none too."""
    pieces = [re.escape(piece).replace(r"\*", "[^/]*") for piece in line.split("**/")]
    return re.compile("(?:.*/)?".join(pieces))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_is_what_serves_with_hashes(lock: Lock) -> None:
    pins = dict(
        line.split("==")
        for file in ("runtime.txt", "otel.txt", "transformers.txt")
        for line in (ROOT / "requirements" / file).read_text().splitlines()
        if re.match(r"[a-z]", line)
    )
    torch = TORCH if lock.brings else TORCH_CPU
    wanted = {name: version for name, version in pins.items() if name not in BUILD_ONLY} | dict([torch.split("==")])
    wheels = read_lock(lock.path.read_text())
    found = {canonicalize_name(wheel.name): wheel.version for wheel in wheels}
    beside = {name for name in found if name not in wanted}
    assert {name: found[name] for name in wanted} == wanted
    assert all(name == "triton" or name.startswith(("nvidia-", "cuda-")) for name in beside)
    assert bool(beside) == lock.brings
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels)


def check(port: str | None) -> subprocess.CompletedProcess[str]:
    """The health check as the image runs it, with the port in its environment."""
    environment = {**os.environ, "ARMATURE_PORT": port or ""}
    return run([sys.executable, "-SE", HEALTHCHECK], env=environment, timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live(write_checkpoint(tmp_path_factory.mktemp("health") / "tiny")) as started:
        yield started


def port_of(server: LiveServer) -> str:
    return server.url.rpartition(":")[2]


def test_a_live_server_is_healthy(server: LiveServer) -> None:
    assert check(port_of(server)).returncode == 0


def test_a_dead_worker_is_not(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(server.find_served.service), "alive", property(lambda _: False))
    assert server.client.get("/healthz").status_code == 500
    assert check(port_of(server)).returncode == 1


def test_nobody_there_is_said() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        port = str(reserved.getsockname()[1])
        told = check(port)
    assert told.returncode == 1
    assert f"/healthz on port {port}: " in told.stderr


@pytest.mark.parametrize("injected", ["tcp://10.0.0.1:8000", "", "²"])
def test_a_service_of_our_name_changes_no_port(injected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(address: tuple[str, int], seconds: float) -> socket.socket:
        asked.append(address[1])
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setenv("ARMATURE_PORT", injected)
    with pytest.raises(SystemExit):
        runpy.run_path(str(HEALTHCHECK))
    assert set(asked) == {8000}
