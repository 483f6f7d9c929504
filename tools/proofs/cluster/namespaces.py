"""Processes in network and mount namespaces of their own, which end together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

END_SECONDS = 10.0
PAUSE_SECONDS = 0.2
REMOVERS = 16
CGROUPS = Path("/sys/fs/cgroup")


class Unready(RuntimeError):
    """A program of the cluster did not become ready. The message has its last lines."""


@dataclass
class Place:
    """A network namespace, and a mount namespace if it is a node, kept open by a sleeping process."""

    name: str
    holder: subprocess.Popen[bytes]
    mounts: bool

    @classmethod
    def open(cls, name: str, mounts: bool = False) -> Place:
        flags = ["--net", *(["--mount", "--propagation=private"] if mounts else [])]
        holder = subprocess.Popen(["unshare", *flags, "sleep", "infinity"], start_new_session=True)
        # Not before unshare has ended: until then what is mounted there would be mounted on the machine too.
        wait(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", 10, f"no namespace for {name}")
        return cls(name, holder, mounts)

    def command(self, *words: str) -> list[str]:
        flags = ["-n", *(["-m", "--wd=/"] if self.mounts else [])]
        return ["nsenter", "-t", str(self.holder.pid), *flags, *words]

    def run(self, *words: str, text: str | None = None, check: bool = True, seconds: float = 300.0) -> str:
        """Run a command there and return its output. Raises `RuntimeError` with what it said."""
        made = subprocess.run(
            self.command(*words), input=text, capture_output=True, text=True, check=False, timeout=seconds
        )
        if check and made.returncode:
            raise RuntimeError(f"{' '.join(words[:6])}: {made.stderr.strip()}")
        return made.stdout


@dataclass
class Lab:
    """The cluster's folder, its places and its processes. `close` ends whatever was started."""

    folder: Path
    programs: Path
    places: list[Place] = field(default_factory=list)
    processes: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    @property
    def group(self) -> str:
        """The control group of its nodes, named after this process, so that two labs never share one."""
        return f"armature-proof-{os.getpid()}"

    def place(self, name: str, mounts: bool = False) -> Place:
        self.places.append(Place.open(name, mounts))
        return self.places[-1]

    def start(self, name: str, place: Place, *words: str) -> None:
        """Start one of the programs there; its log is `folder`/logs/NAME."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        with (self.folder / "logs" / name).open("wb") as log:
            process = subprocess.Popen(
                place.command(str(self.programs / words[0]), *words[1:]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PATH": f"{self.programs}:{os.environ['PATH']}"},
            )  # fmt: skip
        self.processes.append((name, process))

    def until(self, ready: Callable[[], bool], seconds: float, name: str) -> None:
        """Wait until `ready`. Raises `Unready` with the last lines of that program's log, at once if it has ended."""
        (process,) = (process for each, process in self.processes if each == name)
        try:
            wait(lambda: process.poll() is not None or ready(), seconds, f"{name} was not ready after {seconds:g} s")
            if process.poll() is not None:
                raise TimeoutError(f"{name} ended with status {process.returncode}")
        except TimeoutError as error:
            log = (self.folder / "logs" / name).read_text(errors="replace").splitlines()[-5:]
            raise Unready(f"{error}: {' / '.join(log)}") from error

    def end(self, *names: str) -> None:
        """End these programs, which nothing else needs."""
        _end([process for name, process in self.processes if name in names])

    def close(self) -> None:
        """End everything: Kubernetes' programs, then what runs in the nodes' control groups, then the rest."""
        for names in (("kube",), ("containerd",), ("",)):
            chosen = [process for name, process in self.processes if name.startswith(names)]
            _end(chosen)
            if names == ("kube",):
                self._end_pods()
        _end([place.holder for place in self.places])
        with suppress(TimeoutError):  # a group cannot be removed before what was killed in it has ended
            wait(self._groups_removed, END_SECONDS, "")
        self.processes.clear()
        self.places.clear()
        remove_folder(self.folder)

    def _groups(self) -> list[Path]:
        return [each for pattern in (f"{self.group}-*", f"*/{self.group}-*") for each in CGROUPS.glob(pattern)]

    def _groups_removed(self) -> bool:
        """Try once to remove the groups, inner ones first. Returns True if none is left."""
        self._end_members()
        for group in self._groups():
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    Path(folder).rmdir()
        return not self._groups()

    def _end_members(self) -> None:
        for group in self._groups():
            for folder, _, _ in os.walk(group):
                with suppress(OSError):  # a kubelet that ends may have removed it
                    for pid in Path(folder, "cgroup.procs").read_text().split():
                        _kill(int(pid))

    def _end_pods(self) -> None:
        self._end_members()
        own = {Path(f"/proc/{place.holder.pid}/ns/mnt").readlink() for place in self.places if place.mounts}
        for process in Path("/proc").glob("[0-9]*"):  # the shims of containerd outlive it
            try:
                if (process / "ns" / "mnt").readlink() in own and (process / "comm").read_text().startswith(
                    "containerd-shim"
                ):
                    _kill(int(process.name))
            except OSError:
                continue


def wait(ready: Callable[[], bool], seconds: float, failed: str) -> None:
    """Poll until `ready` is true. Raises `TimeoutError` with the sentence `failed`."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(failed)
        time.sleep(PAUSE_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def remove_folder(folder: Path) -> None:
    """Remove a folder and everything in it; what cannot be removed stays.

    Many threads do it, since on disks that discard freed blocks at once each file waits for the disk: the 37,000 files
    of two nodes took one thread 80 s.
    """
    with ThreadPoolExecutor(REMOVERS) as pool:
        list(pool.map(_remove_files, os.walk(folder)))
    shutil.rmtree(folder, ignore_errors=True)


def _remove_files(walked: tuple[str, list[str], list[str]]) -> None:
    inside, _, names = walked
    for name in names:
        with suppress(OSError):
            Path(inside, name).unlink()
