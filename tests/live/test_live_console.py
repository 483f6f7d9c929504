"""What `armature serve` prints: few lines at start, a command that works, one line a request, a moving bar on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.settings import DEMO_DIRECTORY
from exported_programs import write_program
from tests.live.live_server import PATIENCE, ServerProcess, server_process, until

MAX_LINES = 12
SECRET = "a text of nobody's concern"


def ready(server: ServerProcess) -> str:
    url = server.url()
    until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
    return url


def stop(server: ServerProcess) -> str:
    server.process.send_signal(signal.SIGTERM)
    status, said = server.finish()
    assert status == 0, said
    return said


@pytest.mark.full
def test_a_start_has_few_lines_and_a_request_one(tiny: Path) -> None:
    with server_process(tiny) as server:
        url = ready(server)
        body = {"prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions?{SECRET}", json=body, headers={"x-request-id": "mine"})
        usage = answer.json()["usage"]
        said = stop(server).splitlines()
    requests = [line for line in said if " id=" in line]
    assert len(said) - len(requests) + 1 <= MAX_LINES, said  # with the address on standard output
    assert len(requests) == 1, "probes are logged at debug"
    tokens = f"prompt_tokens={usage['prompt_tokens']} completion_tokens=3"
    times = r"queue_ms=\d+\.\d first_token_ms=\d+\.\d total_ms=\d+\.\d"
    assert re.search(f" INFO POST /v1/completions 200 id=mine {tokens} {times}$", requests[0])
    assert not any("nobody" in line for line in said)
    assert any(" ready      in " in line and url in line for line in said)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("kind", ["chat", "encoder", "program"])
def test_the_printed_command_works(kind: str, tmp_path: Path) -> None:
    models = {"chat": DEMO_DIRECTORY, "encoder": DEMO_DIRECTORY.parent / "bert"}
    with server_process(models.get(kind) or write_program(tmp_path, "recommender")) as server:
        ready(server)
        assert server.process.stderr is not None
        line = next(line for line in server.process.stderr if " INFO try " in line)
        command = line.partition(" INFO try ")[2].strip()
        ran = subprocess.run([*["sh", "-c"], f"{command} --silent --fail"], capture_output=True, timeout=PATIENCE)
        assert ran.returncode == 0, (command, ran.stderr)
        assert json.loads(ran.stdout)
        server.process.terminate()


@pytest.mark.nightly
def test_a_load_is_drawn_in_the_terminal_and_on_a_page(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "load.html"
    with server_process(tiny) as server:
        # So many tokens that no response arrives whole on a busy machine: gaps between tokens are two of the six plots.
        flags = ["--url", ready(server), "--concurrency", "2", "--num-requests", "6", "--max-tokens", "64"]
        command = [sys.executable, "-m", "app", "bench", "http", *flags, "--prompt-tokens", "8", "--report", str(page)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        server.process.terminate()
    assert ran.returncode == 0, ran.stderr
    assert "TTFT: time to the first token" in ran.stderr
    assert f"The page is {page}." in ran.stderr
    assert "picture" not in json.loads(ran.stdout)
    assert page.read_text(encoding="utf-8").count("<svg") == 6


@pytest.mark.nightly
def test_json_lines_and_no_lines_of_requests(tiny: Path) -> None:
    with server_process(tiny, "--log-format", "json", "--no-request-log") as server:
        url = ready(server)
        assert httpx.post(f"{url}/generate", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
        lines = [json.loads(line) for line in stop(server).splitlines()]
    assert {"model", "precision", "ready", "try"} <= {line.get("label") for line in lines}
    assert not [line for line in lines if "route" in line]


@pytest.mark.nightly
def test_a_terminal_has_signs_of_life(tiny: Path) -> None:
    """The bar moves while torch is imported, which reports nothing, and is gone when the server is ready."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "app", "serve", "--model", str(tiny), "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    shown = b""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        while b"try " not in shown:
            shown += os.read(ours, 4096)
        process.terminate()
        assert process.wait(PATIENCE) == 0
    os.close(ours)
    text = shown.decode()
    assert len(set(re.findall("[⠀-⣿](?=.{0,8} importing torch)", text))) > 1, "the spinner stood still"
    assert text.index("importing torch") < text.index("\x1b[1mmodel")
