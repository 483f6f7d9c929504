"""Servers of ours for the tests of a peer: one for each set of options, started at its first use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.peers.ports import free_port, is_answered

ROOT = Path(__file__).resolve().parents[3]
READY_SECONDS = 240.0
MAX_SERVERS = 3  # at once; more would compete for the cores and the memory
ENVIRONMENT = "PEER_SUITES"  # names the JSON object by which the command configures the plugins


class ServerPool:
    """Starts `armature serve`, keeps the servers that were used last, and stops all of them at the end.

    With `url` in the configuration every test gets that server, whatever options it asks for.
    """

    def __init__(self) -> None:
        self.configuration = json.loads(os.environ[ENVIRONMENT])
        self._running: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], str]] = {}

    def url(self, model: str, **options: object) -> str:
        if self.configuration["url"]:
            return str(self.configuration["url"]).rstrip("/")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in sorted(options.items())]
        key = (model, *flags)
        if key not in self._running:
            while len(self._running) >= MAX_SERVERS:
                self._stop(next(iter(self._running)))
            self._running[key] = self._start(key)
        self._running[key] = self._running.pop(key)  # the one used last is last
        return self._running[key][1]

    def _start(self, key: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], str]:
        port, log = free_port(), tempfile.TemporaryFile()  # noqa: SIM115 - the process keeps it
        flags = ["--port", str(port), "--any-model-name=on", "--calibrate=off", "--log-level=error", *key[1:]]
        command = [self.configuration["python"], "-m", "app", "serve", "--model", key[0], *flags]
        launcher = [sys.executable, "-I", "-S", str(ROOT / "tools" / "peers" / "launch.py"), "--", *command]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(launcher, cwd=ROOT, env=clean, stdout=log, stderr=log)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
        while not is_answered(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read()[-2000:].decode(errors='replace')}")
            time.sleep(0.1)
        return process, url

    def _stop(self, key: tuple[str, ...]) -> None:
        process, _ = self._running.pop(key)
        process.terminate()
        process.wait(30)

    def close(self) -> None:
        for key in list(self._running):
            self._stop(key)
