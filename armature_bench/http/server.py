"""A server process for the benches: start it, wait until it is ready, and stop it; or use one that already runs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from armature_bench.console import MeasurementFailed
from armature_bench.http.client import ArmatureClient
from armature_bench.http.wire import HttpClient

READY_SECONDS = 600.0  # packing a large checkpoint on a small machine takes minutes
POLL_SECONDS = 0.02
STOP_SECONDS = 60.0
_ADDRESS = re.compile(r"https?://[\w.\[\]:]+:\d+")
_PACKAGES = Path(__file__).resolve().parents[3]  # folder from which this `app` package was imported


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A ready server.

    `pid`, `started` and `ready` (`time.perf_counter` seconds) are None for a server that the bench did not start.
    """

    client: ArmatureClient
    url: str
    pid: int | None = None
    started: float | None = None
    ready: float | None = None


@asynccontextmanager
async def running_server(url: str | None, flags: Sequence[str]) -> AsyncIterator[BenchServer]:
    """Yield the server at `url`, or else a new one with these flags of `armature serve` on a free local port."""
    if url is None:
        async with _start_server(flags) as server:
            yield server
        return
    with closing(HttpClient(url)) as wire:
        client = ArmatureClient(wire)
        if not await client.ready():
            raise MeasurementFailed(f"{url} is not ready")
        yield BenchServer(client, url)


@asynccontextmanager
async def _start_server(flags: Sequence[str]) -> AsyncIterator[BenchServer]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    }
    # -P: do not import an `app` folder in the current directory.
    command = (sys.executable, "-P", "-m", "app", "serve", "--port", "0", "--host", "127.0.0.1", *flags)
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    log = _ServerLog(process)
    try:
        url = await log.address()
        with closing(HttpClient(url)) as wire:
            client = ArmatureClient(wire)
            while not await client.ready():
                if log.ended:
                    raise log.failure()
                if time.perf_counter() - started > READY_SECONDS:
                    raise MeasurementFailed(f"the server at {url} was not ready after {READY_SECONDS:g} s")
                await asyncio.sleep(POLL_SECONDS)
            yield BenchServer(client, url, process.pid, started, time.perf_counter())
    finally:
        await _stop(process)
        await log.close()


class _ServerLog:
    """Reads the output of the process, so that it never blocks on a full pipe, and keeps the last lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail: deque[str] = deque(maxlen=15)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    async def address(self) -> str:
        return await self._address

    @property
    def ended(self) -> bool:
        return self._reading.done()

    def failure(self) -> MeasurementFailed:
        return MeasurementFailed("the server ended before it was ready:\n" + "".join(self._tail))

    async def close(self) -> None:
        await self._reading
        if self._address.done() and not self._address.cancelled():
            self._address.exception()  # retrieve it, so that asyncio does not warn if it was never awaited

    async def _read(self) -> None:
        assert self._process.stdout is not None, "the process was started with a pipe"
        async for line in self._process.stdout:
            self._tail.append(line.decode(errors="replace"))
            found = _ADDRESS.search(self._tail[-1])
            if found is not None and not self._address.done():
                self._address.set_result(found.group())
        if not self._address.done():
            self._address.set_exception(self.failure())


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
