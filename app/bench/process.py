"""What a server costs as a process: seconds from its start to a first token, and memory while it serves."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from app.bench.client import beside_each_other
from app.bench.console import Advance
from app.bench.server import Server, serving
from app.bench.stats import Figure, MeasurementFailed

PROMPT = range(10, 26)  # any tokens; asking the server for some would be part of the time
START_TARGET_SECONDS = 5.0
MEMORY_TARGET = 1.15
MEMORY_STREAMS = 4
MEMORY_PROMPT_TOKENS = 256
MEMORY_MAX_TOKENS = 64


async def time_to_first_token(flags: Sequence[str], rounds: int, advance: Advance) -> list[Figure]:
    """From starting the process to the first token of a short prompt. The first start only warms the page cache."""
    totals: list[float] = []
    readies: list[float] = []
    imports: list[float] = []
    for number in range(rounds + 1):
        async with serving(None, flags) as server:
            assert server.started is not None, "a server of our own notes when it was started"
            assert server.ready is not None, "and when it was ready"
            answer = await server.client.generate(PROMPT, 1)
        if number > 0:
            totals.append(answer.pieces[0][0] - server.started)
            readies.append(server.ready - server.started)
            imports.append(await _import_torch())
        advance(f"start {number + 1} of {rounds + 1}")
    total = statistics.median(totals)
    return [
        Figure("process start to first token", total, "s", p99=max(totals), target=START_TARGET_SECONDS, at_most=True),
        Figure("process start to ready", statistics.median(readies), "s", p99=max(readies)),
        Figure("importing torch, alone in a process", statistics.median(imports), "s", p99=max(imports)),
    ]


async def _import_torch() -> float:
    """Seconds that `import torch` takes in a fresh interpreter, without the interpreter's own start."""
    script = "import time; s = time.perf_counter(); import torch; print(time.perf_counter() - s)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return float(printed)


async def resident_memory(server: Server, weight_bytes: int, kv_bytes_per_token: int, advance: Advance) -> list[Figure]:
    """Resident bytes of the process while streams run, over the weights and the keys and values of their tokens."""
    if server.pid is None:
        raise MeasurementFailed("memory is read from a process of our own: leave out --url")
    deck = await server.client.deck()
    async with beside_each_other() as tasks:
        for _ in range(MEMORY_STREAMS):
            tasks.create_task(server.client.generate(deck.prompt(MEMORY_PROMPT_TOKENS), MEMORY_MAX_TOKENS))
    # What has finished stays in the KV cache for reuse, so nothing of it has been given back yet.
    resident = resident_bytes(server.pid)
    advance("read")
    touched = MEMORY_STREAMS * (MEMORY_PROMPT_TOKENS + MEMORY_MAX_TOKENS) * kv_bytes_per_token
    return [
        Figure("weights", weight_bytes / 2**20, "MiB"),
        Figure("touched KV", touched / 2**20, "MiB"),
        Figure(
            "resident memory",
            resident / 2**20,
            "MiB",
            ratio=resident / (weight_bytes + touched),
            against="weights and touched KV",
            target=MEMORY_TARGET,
            at_most=True,
        ),
    ]


def resident_bytes(pid: int) -> int:
    """What a process holds of physical memory, mapped files included."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if rollup.exists():
        line = next(line for line in rollup.read_text().splitlines() if line.startswith("Rss:"))
        return int(line.split()[1]) * 1024
    with os.popen(f"ps -o rss= -p {pid:d}") as printed:  # macOS
        return int(printed.read()) * 1024
