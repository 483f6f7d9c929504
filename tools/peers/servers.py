"""HTTP servers as sides of a comparison: any command that serves OpenAI's completions on a port.

A server is stopped between its turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from armature_bench.http.client import stream_request
from armature_bench.http.dialects import GENERATE_DIALECTS, StreamRequest
from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import GenerateRun, GenerateTraffic, GenerateWorkload, first_served_model, prompts_for
from armature_bench.http.wire import HttpClient, HttpRequestFailed
from tools.peers.ports import free_port
from tools.peers.sides import LAST_LINES, ROOT, environment

POLL_SECONDS = 0.05
READY_SECONDS = 900.0
COMPLETIONS = GENERATE_DIALECTS["completions"]
HELLO = "once upon a time"
TICKS = os.sysconf("SC_CLK_TCK")
AskOne = Callable[
    [HttpClient, str | None], Awaitable[object]
]  # sends one request to the model of this name; raises `HttpRequestFailed`


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`NAME=[VARIABLE=value ...] PROGRAM ARGUMENT...`; `{port}` among the arguments becomes the port."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ServerSpec:
        """Parse the text. Raises `ValueError` with a sentence."""
        name, equals, rest = text.partition("=")
        words, variables = shlex.split(rest), {}
        while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
            variable, _, value = words.pop(0).partition("=")
            variables[variable] = value
        if not (name and equals and words):
            raise ValueError(f"{text!r} is not NAME=[VARIABLE=value ...] PROGRAM ARGUMENT...")
        if not any("{port}" in word for word in words):
            raise ValueError(f"{name}: the command must contain {{port}}")
        return cls(name, tuple(words), variables)


class ServerSide:
    """A server in its own process group. It runs until `halt`, and later only within `awake`."""

    def __init__(self, spec: ServerSpec, procs: Sequence[Path] = ()) -> None:
        """Start the server. `procs` are lists of control groups that it joins first."""
        self.spec, port = spec, free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        command = [word.replace("{port}", str(port)) for word in spec.command]
        groups = [word for file in procs for word in ("--procs", str(file))]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / "tools" / "peers" / "launch.py"), *groups, "--", *command],
            cwd=ROOT,
            env=environment(dict(os.environ), spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def first_answer(self, ask: AskOne | None = None) -> float:
        """Return the seconds from the start of the process to its first answer.

        The request is one token unless `ask` sends another. It is repeated until it succeeds.
        """
        with closing(HttpClient(self.url)) as wire:
            while True:
                with suppress(HttpRequestFailed):
                    await (ask or _one_token)(wire, await first_served_model(wire))
                    return time.perf_counter() - self.started
                if self._process.poll() is not None:
                    raise SystemExit(self.complaint("ended"))
                if time.perf_counter() - self.started > READY_SECONDS:
                    raise SystemExit(self.complaint(f"has not answered within {READY_SECONDS:g} s"))
                await asyncio.sleep(POLL_SECONDS)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.halt()

    def halt(self) -> None:
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Tell the server to stop, as a supervisor does: it finishes its open requests."""
        self._signal(signal.SIGTERM)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its processes so far, or 0 where /proc is missing."""
        return sum(map(_cpu_seconds, _group(self._process.pid)))

    def complaint(self, what: str) -> str:
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"{self.spec.name} {what}:", *last])

    def _signal(self, number: int) -> None:
        """Signal the whole group, since some servers compute in another process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


async def _one_token(wire: HttpClient, model: str | None) -> None:
    await stream_request(wire, COMPLETIONS, StreamRequest(HELLO, 1, model=model))


async def traffic_to(side: ServerSide, wanted: GenerateWorkload, wire: HttpClient) -> tuple[GenerateTraffic, str]:
    """Return the traffic for a running server, and a description of its prompts."""
    model = await first_served_model(wire)
    deck, words = await prompts_for(wire, COMPLETIONS, model, wanted.seed)
    return GenerateTraffic(wire, COMPLETIONS, model, deck, wanted), words


async def one_run(traffic: GenerateTraffic, clients: int, requests_each: int, warm_up_tokens: int) -> GenerateRun:
    """Run a closed loop of `clients` clients.

    Raises `SystemExit` if a request fails, because the figure would be wrong without it.
    """
    await traffic.warm_up(clients, warm_up_tokens)
    run = GenerateRun()
    await traffic.run_closed_loop(run, clients, RunLimits(num_requests=clients * requests_each))
    if run.failures:
        raise SystemExit("; ".join(f"{kind}: {message}" for kind, message in run.messages.items()))
    return run


def server_spec(text: str) -> ServerSpec:
    """Parse the value of a `--server` or `--peer` flag for argparse."""
    try:
        return ServerSpec.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of each round. A round in which the other has no figure counts as 0."""
    return statistics.median(one / other if other else 0.0 for one, other in zip(ours, others, strict=True))


def report_progress(text: str) -> None:
    """Print a line to stderr, since stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def _group(leader: int) -> list[list[str]]:
    """Return the fields after the name in /proc/PID/stat for every process of a group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            if fields[2] == str(leader):
                found.append(fields)
    return found


def _cpu_seconds(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS
