"""Containers as a cluster runs them, through the docker command: hardened, and always removed."""

from __future__ import annotations

import json
import os
import platform as host_platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any

import httpx

LABEL = f"armature.proof={os.getpid()}"
# The options of Kubernetes' restricted pod security standard, and a read-only root file system.
HARDENED = (
    "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001:10001",
)  # fmt: skip
POLL_SECONDS = 0.02
COMMAND_SECONDS = 300.0
READY_SECONDS = 900.0  # importing torch takes minutes in emulation
_numbers = count()


class ContainerEnded(RuntimeError):
    """A container ended instead of serving. The message has its last lines."""


def docker(*words: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run docker in its own session, so that Ctrl-C does not interrupt the removal of containers."""
    made = subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=False, timeout=seconds, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    if check and made.returncode != 0:
        raise RuntimeError(f"docker {' '.join(words)}: {made.stderr.strip()}")
    return made


def remove_all() -> None:
    """Remove every container of this run and its anonymous volumes."""
    names = docker("ps", "-aq", "--filter", f"label={LABEL}").stdout.split()
    if names:
        docker("rm", "-f", "-v", *names, check=False)


@dataclass(frozen=True, slots=True)
class Image:
    tag: str
    platform: str  # linux/amd64 or linux/arm64

    @property
    def architecture(self) -> str:
        return self.platform.rpartition("/")[2]

    @property
    def emulated(self) -> bool:
        machine = host_platform.machine().lower()
        return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine) != self.architecture

    @property
    def options(self) -> tuple[str, ...]:
        """Return further options. Emulated images are not measured, and use few threads."""
        return ("--env=ARMATURE_CALIBRATE=off", "--env=ARMATURE_THREADS=1") if self.emulated else ()

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("image", "inspect", "--platform", self.platform, self.tag).stdout)[0]
        return found

    def python(self, script: str, *options: str, seconds: float = COMMAND_SECONDS) -> str:
        """Run a script in the image's interpreter, hardened and without a network, and return its output."""
        words = ("--rm", f"--platform={self.platform}", f"--label={LABEL}", *HARDENED, "--network=none", *options)
        return docker("run", *words, "--entrypoint=python3", self.tag, "-P", "-c", script, seconds=seconds).stdout


@dataclass(slots=True)
class Container:
    """A context manager that runs `armature serve` with these docker options and flags, and removes the container."""

    image: Image
    options: Sequence[str] = ()
    flags: Sequence[str] = ()
    publish: bool = True
    name: str = field(default_factory=lambda: f"armature-proof-{os.getpid()}-{next(_numbers)}")
    url: str = ""
    asked: float = 0.0  # time at which docker was called to start it

    def __enter__(self) -> Container:
        port = ("--publish=127.0.0.1::8000",) if self.publish else ()
        words = (f"--platform={self.image.platform}", f"--name={self.name}", f"--label={LABEL}", *HARDENED, *port)
        words += (*self.image.options, *self.options)
        self.asked = time.perf_counter()
        docker("run", "--detach", *words, self.image.tag, "serve", *self.flags)
        if self.publish:
            port_line = docker(
                "port", self.name, "8000/tcp", check=False
            ).stdout.splitlines()  # empty if the container has ended
            self.url = f"http://{port_line[0]}" if port_line else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        docker("rm", "-f", "-v", self.name, check=False)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.name).stdout)
        return found

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> float:
        """Return the seconds from the docker command to readiness. Raises `ContainerEnded`."""
        deadline, next_look = time.monotonic() + seconds, time.monotonic() + 1
        while self.status("/readyz") != 200:
            if time.monotonic() > next_look:  # querying the daemon costs more than querying the server
                next_look = time.monotonic() + 1
                if not self.state()["Running"] or time.monotonic() > deadline:
                    raise ContainerEnded(
                        f"not ready after {time.perf_counter() - self.asked:.0f} s: {self.last_words()}"
                    )
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - self.asked

    def status(self, path: str) -> int | None:
        """Return the status code of a GET, or None without an answer."""
        try:
            return httpx.get(self.url + path, timeout=30).status_code
        except httpx.TransportError:
            return None

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=60).raise_for_status()
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def post(self, path: str, body: Any, seconds: float = 600.0) -> Any:
        return httpx.post(self.url + path, json=body, timeout=seconds).raise_for_status().json()

    def wait(self, seconds: float) -> int:
        return int(docker("wait", self.name, seconds=seconds).stdout)

    def log(self) -> str:
        made = docker("logs", self.name, check=False)
        return made.stderr + made.stdout

    def last_words(self) -> str:
        return " / ".join(line for line in self.log().splitlines()[-3:] if line)
