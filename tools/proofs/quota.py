"""Under CPU quotas: the sizes of the plan's pools, tokens per second and per core, and the throttled time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armature_bench.http.dialects import GENERATE_DIALECTS
from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import (
    GenerateRun,
    GenerateTraffic,
    GenerateWorkload,
    overall_rate,
    prompts_for,
    served_model,
)  # fmt: skip
from armature_bench.http.wire import HttpClient, event_loop
from armature_bench.http.workload import UniformLengths
from tools.peers.ports import free_port
from tools.proofs.containers import Container, Image
from tools.proofs.findings import Findings, progress

PROMPT_TOKENS, MAX_TOKENS = 128, 96
CORES = (0.5, 1.0, 1.5, 2.0)
WHOLE = (1.5, 2.0)  # from this number of cores on, the threads fit into the quota and must not be throttled
MOST_THROTTLED = 0.02  # share of the run's time
SECONDS = 10.0  # seconds of each run; open requests are finished
CLIENTS = (1, 8)  # the last is the full load
POOLS = ("threads", "interop_threads", "tokenizer_threads", "http_threads")
THROTTLED, CPU_TIME = "process_cgroup_cpu_throttled_seconds_total", "process_cpu_seconds_total"


@dataclass(frozen=True, slots=True)
class Load:
    """The model to serve: a checkpoint's folder, further flags of the server, and the rounds of each load."""

    model: Path
    flags: Sequence[str]
    rounds: int


@dataclass(slots=True)
class Measured:
    """The results of one load, one number per round."""

    rates: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)  # throttled thread seconds per second of the run
    cores: list[float] = field(default_factory=list)  # CPU seconds per second of the run


Results = Mapping[int, Measured]  # by number of clients


def run(findings: Findings, image: Image, load: Load) -> None:
    findings.notes.append(said(load))
    pools = []
    for cores in CORES:
        with event_loop() as runner:
            plan, results = runner.run(_at(image, load, cores))
        pools.append((f"{cores:g}", *(str(plan[name]["value"]) for name in POOLS), plan["threads"]["reason"]))
        findings.check(
            f"{cores:g} cores: no pool is larger than the quota",
            all(int(plan[name]["value"]) <= max(1, cores) for name in POOLS),
            ", ".join(f"{plan[name]['value']}" for name in POOLS),
            f"<= {max(1, int(cores))} each",
        )
        judge(findings, cores, results)
    findings.table("Pools by quota, as `/info` tells", ("cores", *POOLS, "reason"), pools)


def said(load: Load) -> str:
    flags = f" with `{' '.join(load.flags)}`" * bool(load.flags)
    return f"Medians of {load.rounds} rounds of {SECONDS:g} s; the server has {load.model.resolve().name}{flags}."


async def _at(image: Image, load: Load, cores: float) -> tuple[Mapping[str, Any], Results]:
    """Serve on the host's network: port forwarding would use CPU outside the quota."""
    port, results = free_port(), {clients: Measured() for clients in CLIENTS}
    options = (
        f"--cpus={cores:g}", "--memory=8g", "--network=host", "--env=ARMATURE_HOST=127.0.0.1", f"--env=ARMATURE_PORT={port}",
        f"--volume={load.model.resolve()}:/models/model:ro", "--no-healthcheck",
    )  # fmt: skip
    with Container(image, options, ("--model", "/models/model", *load.flags), publish=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        server.wait_until_ready()
        with closing(HttpClient(server.url)) as wire:
            dialect, model = GENERATE_DIALECTS["completions"], await served_model(wire, None)
            prompts, _ = await prompts_for(wire, dialect, model, 0)
            lengths = (UniformLengths(tokens, tokens) for tokens in (PROMPT_TOKENS, MAX_TOKENS))
            traffic = GenerateTraffic(wire, dialect, model, prompts, GenerateWorkload(*lengths))
            for _round in range(load.rounds):
                for clients in CLIENTS:
                    await _measure(server, traffic, clients, results[clients])
                    progress(f"{cores:g} cores, ×{clients}: {results[clients]}")
        return server.get("/info")["plan"], results


async def _measure(server: Container, traffic: GenerateTraffic, clients: int, measured: Measured) -> None:
    await traffic.warm_up(clients, 16)
    before = [sample(server, name) for name in (THROTTLED, CPU_TIME)]
    run = GenerateRun()
    await traffic.run_closed_loop(run, clients, RunLimits(seconds=SECONDS))
    throttled, cpu = (sample(server, name) - old for name, old in zip((THROTTLED, CPU_TIME), before, strict=True))
    if run.failures:
        raise RuntimeError("; ".join(run.messages.values()))
    wall = run.ended - run.started
    measured.rates.append(overall_rate(run))
    measured.throttled.append(throttled / wall)
    measured.cores.append(cpu / wall)


def sample(server: Container, name: str) -> float:
    """Return a metric of the server. Throttled seconds exist if it detected a quota."""
    lines = (line.split() for line in server.get("/metrics").splitlines())
    found = next((float(words[1]) for words in lines if words and words[0] == name), None)
    if found is None:
        raise RuntimeError(f"the server has no metric {name}, which must not be taken for zero")
    return found


def judge(findings: Findings, cores: float, results: Results) -> None:
    """Check that nothing is throttled where threads fit into the quota."""
    rows = []
    for clients, of in results.items():
        rate, used, stopped = (statistics.median(values) for values in (of.rates, of.cores, of.throttled))
        rows.append((f"×{clients}", f"{rate:.1f}", f"{rate / cores:.1f}", f"{used:.2f}", f"{stopped:.1%}"))
    findings.table(f"{cores:g} cores", ("clients", "tok/s", "tok/s a core", "cores used", "throttled"), rows)
    if cores in WHOLE:
        stopped = statistics.median(results[CLIENTS[-1]].throttled)
        found, wanted = f"{stopped:.2%} of the run", f"< {MOST_THROTTLED:.0%}"
        findings.check(f"{cores:g} cores, full load: throttled", stopped < MOST_THROTTLED, found, wanted)
