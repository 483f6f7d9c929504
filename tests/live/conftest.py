"""A tiny checkpoint and one server of it that most live tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, live
from tests.live.web_browser import INSECURE_HOST, Visits, chromium
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a context of 256 tokens, byte-level text."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def shared(tiny: Path) -> Iterator[LiveServer]:
    with live(tiny, max_running_seqs=8) as server:
        yield server


@pytest.fixture
def demo() -> Iterator[LiveServer]:
    """The checkpoint that comes with the package: enough work for a prefill to take a while."""
    with live(DEMO_DIRECTORY) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """The shared server, which a test must leave serving and empty."""
    shared.reins.batches.clear()
    yield shared
    shared.reins.release()
    assert shared.generate(max_tokens=2).status_code == 200
    assert shared.idle
    assert not shared.fatal


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def decoder() -> Iterator[LiveServer]:
    """The checkpoint that comes with the package, for the web page."""
    with live(DEMO_DIRECTORY, calibrate="off", allowed_hosts=("127.0.0.1", "localhost", INSECURE_HOST)) as server:
        yield server


@pytest.fixture
def visit(browser: Any) -> Iterator[Visits]:
    """Open the page of a server. Afterwards: no error of the console, and no request to another origin."""
    visits = Visits(browser)
    yield visits
    visits.close()
    assert visits.told == []


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout".split()
    try:
        subprocess.run([*made, key, "-out", cert, *subject], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("this machine has no openssl")
    return cert, key
