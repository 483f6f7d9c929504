"""Fixtures of the attacks: a tiny checkpoint and one server of it, as in the live tests; a certificate."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.live.conftest import server, shared, tiny

__all__ = ["server", "shared", "tiny"]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        key,
        "-out",
        cert,
        *subject,
    ]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("this machine has no openssl")
    return cert, key
