"""The benches that speak to a server, by name: start or find it, measure, and say what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.console import Advance, progress
from app.bench.latency import inter_token_latency, shared_prefix
from app.bench.overhead import outside_the_model
from app.bench.process import resident_memory, time_to_first_token
from app.bench.server import serving
from app.bench.stats import Figure, Outcome


@dataclass(frozen=True, slots=True)
class Job:
    """`flags` are those of `armature serve`, for a server of our own; `url` is one that runs already.

    `tokens` is the length of the long prompt or the prefix; `weight_bytes` and `kv_bytes_per_token` are what memory is held against.
    """

    bench: str
    subject: str
    flags: tuple[str, ...]
    url: str | None = None
    rounds: int = 5
    tokens: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


def measure(job: Job) -> Outcome:
    """Everything that one command measures. Raises `MeasurementFailed`."""
    units = {"start": job.rounds + 1, "memory": 1}.get(job.bench, job.rounds)
    with progress(units, f"bench {job.bench}") as advance:
        figures = asyncio.run(_measured(job, advance))
    return Outcome(job.bench, job.subject, tuple(figures), {"rounds": job.rounds, "flags": list(job.flags), "url": job.url})


async def _measured(job: Job, advance: Advance) -> Sequence[Figure]:
    if job.bench == "start":
        return await time_to_first_token(job.flags, job.rounds, advance)
    async with serving(job.url, job.flags) as server:
        if job.bench == "memory":
            return await resident_memory(server, job.weight_bytes, job.kv_bytes_per_token, advance)
        if job.bench == "itl":
            return await inter_token_latency(server.client, job.tokens, job.rounds, advance)
        if job.bench == "prefix":
            return await shared_prefix(server.client, job.tokens, job.rounds, advance)
        assert job.bench == "overhead", f"no bench is called {job.bench}"
        return await outside_the_model(server.client, job.rounds, advance)
