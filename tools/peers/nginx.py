"""A real nginx on loopback, before which tests and proofs run the documented configuration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

PLACES = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"]
)  # Debian's nginx is not in a user's PATH
START_SECONDS = 10.0


def whole(folder: Path, blocks: str) -> str:
    """Return a configuration with these blocks in `http`. All files are written to `folder`."""
    user = "user root;\n" if os.geteuid() == 0 else ""  # otherwise root's nginx could not write to the folder
    places = "".join(
        f"  {name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"{user}daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log stderr warn;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{\n  access_log off;\n{places}{blocks}}}\n"
    )


class Nginx:
    def __init__(self, text: Callable[[Path], str], ports: Sequence[int]) -> None:
        """Start nginx and wait until it answers on all ports. `text` returns the configuration for a folder."""
        program = shutil.which("nginx", path=PLACES)
        if program is None:
            raise SystemExit("nginx is not installed; on Debian and Ubuntu: sudo apt install nginx-light")
        self._folder = tempfile.TemporaryDirectory(prefix="armature-nginx-")
        folder = Path(self._folder.name)
        file, self._said = folder / "nginx.conf", folder / "said"
        file.write_text(text(folder))
        with self._said.open("wb") as said:
            command = [program, "-p", str(folder), "-c", str(file), "-e", "stderr"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        self._await(ports)

    def end(self) -> None:
        self._process.terminate()  # without draining: all requests have been answered
        self._process.wait()
        self._folder.cleanup()

    def _await(self, ports: Sequence[int]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all(_answers(port) for port in ports):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._said.read_text(errors="replace")
                self.end()
                raise SystemExit(f"nginx does not start: {said}")
            time.sleep(0.01)


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
