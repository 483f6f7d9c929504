"""A server that a command in a terminal starts for itself, on a free port of this machine, and ends when it leaves.

It ends when its standard input does, so it never outlives the command. It is not in the terminal's foreground, so that
Ctrl-C stops an answer and not the server.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.cli.clients.connection import ServerConnection, ServerRefused, parse_object
from app.errors import ServingFailed, StartupError
from app.settings import settings_with, variable_of

POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
_PACKAGES = Path(__file__).resolve().parents[3]  # the folder from which this package `app` was imported
CHILD_MODULE = "app.cli.clients.child_server"
_SENTENCE = "armature: "  # what the server prints before the reason why it ends

_NETWORK_VARIABLES = frozenset(variable_of(name) for name in settings_with(group="network"))

ShowStage = Callable[[str], None]


@contextmanager
def own_server(flags: Sequence[str], show: ShowStage) -> Iterator[ServerConnection]:
    """Start a server with these flags, yield it when it is ready, and end it. Raises `StartupError`."""
    key = secrets.token_hex(16)  # so that no other user of this machine can use the server
    environment = {name: value for name, value in os.environ.items() if name not in _NETWORK_VARIABLES}
    environment[variable_of("api_keys")] = key
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    # -P: a folder `app` in the current directory is not imported.
    command = (sys.executable, "-P", "-m", CHILD_MODULE, "--host=127.0.0.1", "--port=0", "--no-request-log", *flags)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0
        )
        try:
            show("starting")
            assert process.stdout is not None, "it was started with a pipe"
            url = process.stdout.readline().decode().removeprefix("listening on ").strip()
            server = ServerConnection(url, key)
            while not (url and process.poll() is None and is_ready(server, show)):
                if not url or process.poll() is not None:
                    status = process.wait()
                    raise (StartupError if status == 2 else ServingFailed)(_reason(status, log.fileno()))
                time.sleep(POLL_SECONDS)
            yield server
        finally:
            _stop(process)


def is_ready(server: ServerConnection, show: ShowStage) -> bool:
    """Return True if a server is ready, else show how far it is. Raises `ServerRefused`."""
    status, body = server.get("/readyz")
    found = parse_object(body.decode(errors="replace")) or {}
    if status != 503:
        return True
    if found.get("status") == "stopping":
        raise ServerRefused(f"{server.url} is stopping.", status)
    progress = found.get("progress")
    stage = str(found.get("stage", "loading"))
    show(f"{progress['phase']}, {progress['percent']}%" if isinstance(progress, dict) else stage)
    return False


def _reason(status: int, log: int) -> str:
    """Return the sentence with which the server ended, or the last lines of its log."""
    text = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    sentence = next((line for line in reversed(lines) if line.startswith(_SENTENCE)), "")
    if sentence:
        return sentence.removeprefix(_SENTENCE)
    return "\n".join([f"The server ended with status {status} before it was ready:", *lines[-5:]])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the server end by the end of its standard input, and kill it if that takes too long."""
    assert process.stdin is not None, "it was started with a pipe"
    assert process.stdout is not None, "it was started with a pipe"
    process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    process.stdout.close()
