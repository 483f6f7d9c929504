"""A server process on several addresses: its lines, its UNIX socket, clients, signals, and a standard output that is closed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import PATIENCE, server_process, until

pytestmark = pytest.mark.full


def test_a_unix_socket_and_a_port_serve_the_same(tiny: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "a.sock", tmp_path / "keys"
    keys.write_text("first\n")
    with server_process(tiny, "--host", f"127.0.0.1,unix:{path}", "--api-key-file", str(keys)) as server:
        url = server.url()
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == f"listening on unix:{path}\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
            until(lambda: client.get("/readyz").status_code == 200)
            assert client.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer first"}
            assert client.get("/v1/models", headers=headers).status_code == 200
            keys.write_text("second\n")
            server.process.send_signal(signal.SIGHUP)
            assert client.get("/v1/models", headers=headers).status_code == 401
            assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer second"}).status_code == 200
        for command in (["chat", "Once", "--max-tokens", "2"], ["top", "--once"]):
            done = subprocess.run(
                [sys.executable, "-m", "app", *command, "--url", f"unix:{path}", "--api-key", "second"],
                capture_output=True, text=True, timeout=PATIENCE,
            )  # fmt: skip
            assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        server.process.send_signal(signal.SIGTERM)
        status, said = server.finish()
    assert (status, path.exists()) == (0, False), said
    assert "the API keys have changed: 1 are new, 1 are no longer accepted" in said


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize("output", ["closed", "/dev/full"])
def test_a_standard_output_that_cannot_be_written_is_no_failure(tiny: Path, tmp_path: Path, output: str) -> None:
    path = tmp_path / "a.sock"
    redirect = ">&-" if output == "closed" else f">{output}"
    command = f'exec "$0" -m app serve --model "$1" --threads 1 --host "unix:$2" {redirect}'
    process = subprocess.Popen(
        ["sh", "-c", command, sys.executable, str(tiny), str(path)], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: path.exists() or process.poll() is not None)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
            until(lambda: client.get("/readyz").status_code == 200)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert "standard output cannot be written" in said and f"listening on unix:{path}" in said
    assert "Traceback" not in said


def test_the_healthcheck_finds_every_address(tiny: Path, tmp_path: Path) -> None:
    check = Path(__file__).parents[2] / "docker" / "healthcheck.py"
    path = tmp_path / "a.sock"
    with server_process(tiny, "--host", f"unix:{path},127.0.0.1") as server:
        server.process.stdout.readline()  # type: ignore[union-attr]
        port = server.process.stdout.readline().rpartition(":")[2].strip()  # type: ignore[union-attr]
        for host in (f"unix:{path}", "0.0.0.0", "::", "127.0.0.1,::1", ""):
            environment = os.environ | {"ARMATURE_HOST": host, "ARMATURE_PORT": port}
            done = subprocess.run([sys.executable, check], env=environment, capture_output=True, timeout=PATIENCE)
            assert done.returncode == 0, (host, done.stderr)
        missing = os.environ | {"ARMATURE_HOST": f"unix:{path}x", "ARMATURE_PORT": port}
        assert (
            subprocess.run([sys.executable, check], env=missing, capture_output=True, timeout=PATIENCE).returncode == 1
        )
