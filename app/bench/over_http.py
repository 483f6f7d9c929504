"""The benches that speak to a server, by name: start or find it, measure, and say what was measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from app.bench.console import Advance, progress
from app.bench.latency import inter_token_latency, shared_prefix
from app.bench.overhead import outside_the_model
from app.bench.process import resident_memory, time_to_first_token
from app.bench.server import Server, serving
from app.bench.stats import Figure, Outcome
from app.bench.wait import LOADS, capacity_and_wait
from app.bench.wire import event_loop


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
    units = {"start": job.rounds + 1, "memory": 1, "wait": 1 + len(LOADS) * job.rounds}.get(job.bench, job.rounds)
    with progress(units, f"bench {job.bench}") as advance, event_loop() as runner:
        figures = runner.run(_measured(job, advance))
    return Outcome(job.bench, job.subject, tuple(figures), {"rounds": job.rounds, "flags": list(job.flags), "url": job.url})


async def _measured(job: Job, advance: Advance) -> Sequence[Figure]:
    flags = (*_FLAGS.get(job.bench, ()), *job.flags)
    if job.bench == "start":  # which starts servers of its own, one after the other
        return await time_to_first_token(job.flags, job.rounds, advance)
    async with serving(job.url, flags) as server:
        return await OF_A_SERVER[job.bench](server, job, advance)


# What a server of our own is started with unless told otherwise. Capacity is told without guesses: they add to it what a text is worth.
# And tokens that come by several have long gaps between them, beside which those that prompts make look short.
_FLAGS: Mapping[str, tuple[str, ...]] = dict.fromkeys(("wait", "itl"), ("--speculation=off",))

OF_A_SERVER: Mapping[str, Callable[[Server, Job, Advance], Awaitable[Sequence[Figure]]]] = {
    "itl": lambda server, job, advance: inter_token_latency(server.client, job.tokens, job.rounds, advance),
    "prefix": lambda server, job, advance: shared_prefix(server.client, job.tokens, job.rounds, advance),
    "memory": lambda server, job, advance: resident_memory(server, job.weight_bytes, job.kv_bytes_per_token, advance),
    "wait": lambda server, job, advance: capacity_and_wait(server.client, job.rounds, advance),
    "overhead": lambda server, job, advance: outside_the_model(server.client, job.rounds, advance),
}
