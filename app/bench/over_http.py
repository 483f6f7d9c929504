"""Benches that measure one server over HTTP, by name: each starts or finds the server and returns its figures."""

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
    """One run of a bench over HTTP.

    `flags` are passed to `armature serve` for a new server; `url` is a server that already runs. `tokens` is the
    length of the long prompt or of the prefix. Memory is compared with `weight_bytes` and `kv_bytes_per_token`.
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
    """Run the bench of one command.

    Raises:
        MeasurementFailed: The server could not be measured.
    """
    units = {"start": job.rounds + 1, "memory": 1, "wait": 1 + len(LOADS) * job.rounds}.get(job.bench, job.rounds)
    with progress(units, f"bench {job.bench}") as advance, event_loop() as runner:
        figures = runner.run(_measured(job, advance))
    return Outcome(job.bench, job.subject, tuple(figures), {"rounds": job.rounds, "flags": list(job.flags), "url": job.url})


async def _measured(job: Job, advance: Advance) -> Sequence[Figure]:
    flags = (*_FLAGS.get(job.bench, ()), *job.flags)
    if job.bench == "start":  # it starts its own servers, one after the other
        return await time_to_first_token(job.flags, job.rounds, advance)
    async with serving(job.url, flags) as server:
        return await OF_A_SERVER[job.bench](server, job, advance)


# Default flags of a new server. Reported capacity excludes speculation, because its gain depends on the text.
# With speculation, several tokens arrive at once with long gaps in between. These would hide the gaps that prompts cause.
_FLAGS: Mapping[str, tuple[str, ...]] = dict.fromkeys(("wait", "itl"), ("--speculation=off",))

OF_A_SERVER: Mapping[str, Callable[[Server, Job, Advance], Awaitable[Sequence[Figure]]]] = {
    "itl": lambda server, job, advance: inter_token_latency(server.client, job.tokens, job.rounds, advance),
    "prefix": lambda server, job, advance: shared_prefix(server.client, job.tokens, job.rounds, advance),
    "memory": lambda server, job, advance: resident_memory(server, job.weight_bytes, job.kv_bytes_per_token, advance),
    "wait": lambda server, job, advance: capacity_and_wait(server.client, job.rounds, advance),
    "overhead": lambda server, job, advance: outside_the_model(server.client, job.rounds, advance),
}
