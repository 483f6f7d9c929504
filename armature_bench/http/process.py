"""Process costs of a server: seconds from its start to a first token, and resident memory while it serves."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from armature_bench.console import AdvanceProgress, Figure, MeasurementFailed
from armature_bench.http.client import concurrent_tasks
from armature_bench.http.server import BenchServer, running_server

START_PROMPT = range(10, 26)  # arbitrary tokens; a request to /tokenize would add to the measured time
START_TARGET_SECONDS = 5.0
MEMORY_TARGET = 1.15
MEMORY_STREAMS = 4
MEMORY_PROMPT_TOKENS = 256
MEMORY_MAX_TOKENS = 64


async def time_to_first_token(flags: Sequence[str], rounds: int, advance: AdvanceProgress) -> list[Figure]:
    """Measure the time from starting the process to the first token of a short prompt.

    The first start is not counted: it warms the page cache.
    """
    totals: list[float] = []
    readies: list[float] = []
    imports: list[float] = []
    for number in range(rounds + 1):
        async with running_server(None, flags) as server:
            assert server.started is not None, "a server that the bench started has a start time"
            assert server.ready is not None, "and a ready time"
            answer = await server.client.generate(START_PROMPT, 1)
        if number > 0:
            totals.append(answer.chunks[0][0] - server.started)
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
    """Return the seconds of `import torch` in a new interpreter, excluding the start of the interpreter."""
    script = "import time; s = time.perf_counter(); import torch; print(time.perf_counter() - s)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return float(printed)


async def resident_memory(
    server: BenchServer, weight_bytes: int, kv_bytes_per_token: int, advance: AdvanceProgress
) -> list[Figure]:
    """Measure the resident memory of the server after streams have run.

    It is compared with the size of the weights plus the keys and values of all tokens.
    """
    if server.pid is None:
        raise MeasurementFailed("memory can only be read from a server that the bench starts: leave out --url")
    prompts = await server.client.token_prompts()
    async with concurrent_tasks() as tasks:
        for _ in range(MEMORY_STREAMS):
            tasks.create_task(server.client.generate(prompts.prompt(MEMORY_PROMPT_TOKENS), MEMORY_MAX_TOKENS))
    # Finished sequences stay in the KV cache for reuse, so their memory is still resident.
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
    """Return the resident physical memory of a process in bytes, including mapped files."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if rollup.exists():
        line = next(line for line in rollup.read_text().splitlines() if line.startswith("Rss:"))
        return int(line.split()[1]) * 1024
    with os.popen(f"ps -o rss= -p {pid:d}") as printed:  # macOS
        return int(printed.read()) * 1024
