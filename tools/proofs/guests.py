"""Servers that take turns under one quota: ours in a container, peers as processes in control groups.

A server is stopped between its turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from armature_bench.http.dialects import GENERATE_DIALECTS
from armature_bench.http.tally import GenerateTraffic, GenerateWorkload, first_served_model, prompts_for
from armature_bench.http.wire import HttpClient
from armature_bench.http.workload import UniformLengths
from tools.peers.ports import free_port
from tools.peers.quota import Quota
from tools.peers.servers import ServerSide, ServerSpec, traffic_to
from tools.proofs.containers import Container, Image, docker

PROMPT_TOKENS, MAX_TOKENS = 128, 96
THROTTLED = "process_cgroup_cpu_throttled_seconds_total"


@dataclass(frozen=True, slots=True)
class Load:
    """The model to serve: a checkpoint's folder, further flags of our server, and the commands of peers."""

    model: Path
    flags: Sequence[str]
    peers: Sequence[ServerSpec]
    rounds: int


class Guest(Protocol):
    """A server in its quota, stopped between its turns."""

    @property
    def name(self) -> str: ...

    @property
    def traffic(self) -> GenerateTraffic: ...

    def awake(self) -> AbstractContextManager[None]: ...

    def throttled_seconds(self) -> float: ...

    def cpu_seconds(self) -> float: ...


@dataclass(slots=True)
class Ours:
    container: Container
    traffic: GenerateTraffic
    name: str = "ours"

    @contextmanager
    def awake(self) -> Iterator[None]:
        docker("unpause", self.container.name)
        try:
            yield
        finally:
            docker("pause", self.container.name)

    def throttled_seconds(self) -> float:
        """Return the throttled seconds by our server's own metric, which exists if it detected a quota."""
        return self._sample(THROTTLED)

    def cpu_seconds(self) -> float:
        return self._sample("process_cpu_seconds_total")

    def _sample(self, name: str) -> float:
        lines = (line.split() for line in self.container.get("/metrics").splitlines())
        found = next((float(words[1]) for words in lines if words and words[0] == name), None)
        if found is None:
            raise RuntimeError(f"{self.name} has no metric {name}, which must not be taken for zero")
        return found


@dataclass(slots=True)
class Peer:
    side: ServerSide
    quota: Quota
    traffic: GenerateTraffic

    @property
    def name(self) -> str:
        return self.side.spec.name

    def awake(self) -> AbstractContextManager[None]:
        return self.side.awake()

    def throttled_seconds(self) -> float:
        return self.quota.throttled_seconds()

    def cpu_seconds(self) -> float:
        return self.side.cpu_seconds()


async def ours(image: Image, load: Load, cores: float, stack: ExitStack) -> tuple[Ours, Mapping[str, Any]]:
    """Start our server on the host's network, as the peers are: port forwarding would use CPU outside the quota."""
    port = free_port()
    options = (
        f"--cpus={cores:g}", "--memory=8g", "--network=host", "--env=ARMATURE_HOST=127.0.0.1", f"--env=ARMATURE_PORT={port}",
        f"--volume={load.model.resolve()}:/models/model:ro", "--no-healthcheck",
    )  # fmt: skip
    container = stack.enter_context(Container(image, options, ("--model", "/models/model", *load.flags), publish=False))
    container.url = f"http://127.0.0.1:{port}"
    container.wait_until_ready()
    plan = container.get("/info")["plan"]
    wire = stack.enter_context(closing(HttpClient(container.url)))
    dialect, model = GENERATE_DIALECTS["completions"], await first_served_model(wire)
    deck, _ = await prompts_for(wire, dialect, model, 0)
    docker("pause", container.name)
    return Ours(container, GenerateTraffic(wire, dialect, model, deck, _wanted())), plan


async def peer(spec: ServerSpec, cores: float, stack: ExitStack) -> Peer:
    quota = Quota.make(spec.name, cores)
    stack.callback(quota.remove)
    side = ServerSide(spec, (quota.procs,))
    stack.callback(side.end)
    await side.first_answer()
    wire = stack.enter_context(closing(HttpClient(side.url)))
    traffic, _ = await traffic_to(side, _wanted(), wire)
    side.halt()
    return Peer(side, quota, traffic)


def _wanted() -> GenerateWorkload:
    return GenerateWorkload(UniformLengths(PROMPT_TOKENS, PROMPT_TOKENS), UniformLengths(MAX_TOKENS, MAX_TOKENS))
