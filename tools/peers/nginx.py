"""A real nginx on loopback, before which tests and proofs run the documented configuration and balancing rules."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tools.peers.ports import free_ports

PLACES = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"]
)  # Debian's nginx is not in a user's PATH
START_SECONDS = 10.0
READ_SECONDS = 600  # a stream may be silent as long as request_timeout lets its request wait


@dataclass(frozen=True, slots=True)
class Rule:
    """How servers are chosen: their weights, and by connections or in turns."""

    weights: Sequence[int]
    least_connections: bool = False


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


def _blocks(port: int, servers: Sequence[str], rule: Rule) -> str:
    return _upstream(port, servers, rule) + _server(port)


def _upstream(port: int, servers: Sequence[str], rule: Rule) -> str:
    chosen = "    least_conn;\n" if rule.least_connections else ""
    # max_fails=0: a comparison must see every failure, instead of nginx leaving out a server after one.
    lines = "".join(
        f"    server {name} weight={weight} max_fails=0;\n" for name, weight in zip(servers, rule.weights, strict=True)
    )
    return f"  upstream armature_{port} {{\n{chosen}{lines}    keepalive 256;\n  }}\n"


def _server(port: int) -> str:
    """Return the server block. It does not buffer, so that stream events pass at once."""
    return (
        f"  server {{\n    listen 127.0.0.1:{port};\n    location / {{\n      proxy_pass http://armature_{port};\n"
        '      proxy_http_version 1.1;\n      proxy_set_header Connection "";\n      proxy_buffering off;\n'
        f"      proxy_read_timeout {READ_SECONDS}s;\n"
        # As in examples/nginx/nginx.conf: a server that ends closes its kept connections, perhaps under a request.
        "      proxy_next_upstream error non_idempotent;\n      proxy_next_upstream_tries 2;\n    }\n  }\n"
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


def before(servers: Sequence[str], rules: Mapping[str, Rule]) -> tuple[Nginx, dict[str, str]]:
    """Start an nginx in front of `servers`. Returns it and the URL of each rule."""
    ports = dict(zip(rules, free_ports(len(rules)), strict=True))
    by_port = {ports[name]: rule for name, rule in rules.items()}
    nginx = Nginx(
        lambda folder: whole(folder, "".join(_blocks(port, servers, rule) for port, rule in by_port.items())),
        list(by_port),
    )
    return nginx, {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
