"""Under CPU quotas: the sizes of the plan's pools, tokens per second and per core, and the throttled time.

Our server runs in a container. Peers run with their defaults in control groups of the same quota. They take turns and
are stopped between them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import GenerateRun, overall_rate
from armature_bench.http.wire import event_loop
from tools.proofs.containers import Image
from tools.proofs.findings import Findings
from tools.proofs.guests import Guest, Load, ours, peer

CORES = (0.5, 1.0, 1.5, 2.0)
WHOLE = (1.5, 2.0)  # from this number of cores on, the threads fit into the quota and must not be throttled
MOST_THROTTLED = 0.02  # share of the run's time
NOISE = 0.03  # relative difference of a rate between two equal runs
SECONDS = 10.0  # seconds of each run; open requests are finished
CLIENTS = (1, 8)  # the last is the full load
POOLS = ("threads", "interop_threads", "tokenizer_threads", "http_threads")


@dataclass(slots=True)
class Measured:
    """The results of one server under one load, one number per round."""

    rates: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)  # throttled thread seconds per second of the run
    cores: list[float] = field(default_factory=list)  # CPU seconds per second of the run

    def rate(self) -> float:
        return statistics.median(self.rates)

    def stopped(self) -> float:
        return statistics.median(self.throttled)


Results = dict[int, dict[str, Measured]]  # by number of clients and server


def run(findings: Findings, image: Image, load: Load) -> None:
    findings.notes.append(said(load))
    if not load.peers:
        findings.skipped.append("a peer beside ours: none was given (`--peer 'NAME=COMMAND'`).")
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
    """Return what was served and how often; for a peer its command without this machine's folders."""
    peers = "; ".join(f"{each.name}: `{' '.join(Path(word).name for word in each.command)}`" for each in load.peers)
    flags = f" with `{' '.join(load.flags)}`" * bool(load.flags)
    return (
        f"Medians of {load.rounds} rounds of {SECONDS:g} s; ours serves {load.model.resolve().name}{flags}"
        + f"; {peers}" * bool(peers)
        + "."
    )


async def _at(image: Image, load: Load, cores: float) -> tuple[Mapping[str, Any], Results]:
    results: Results = {clients: {} for clients in CLIENTS}
    with ExitStack() as stack:
        own, plan = await ours(image, load, cores, stack)
        guests: list[Guest] = [own, *[await peer(spec, cores, stack) for spec in load.peers]]
        for number in range(load.rounds):
            first = number % len(guests)
            for clients in CLIENTS:
                for guest in guests[first:] + guests[:first]:
                    await _turn(guest, clients, results[clients].setdefault(guest.name, Measured()))
                    print(
                        f"{cores:g} cores, ×{clients}: {guest.name} {results[clients][guest.name]}",
                        file=sys.stderr,
                        flush=True,
                    )
    return plan, results


async def _turn(guest: Guest, clients: int, measured: Measured) -> None:
    with guest.awake():
        await guest.traffic.warm_up(clients, 16)
        before = guest.throttled_seconds(), guest.cpu_seconds()
        run = GenerateRun()
        await guest.traffic.run_closed_loop(run, clients, RunLimits(seconds=SECONDS))
        throttled, cpu = guest.throttled_seconds() - before[0], guest.cpu_seconds() - before[1]
    if run.failures:
        raise RuntimeError(f"{guest.name}: " + "; ".join(run.messages.values()))
    wall = run.ended - run.started
    measured.rates.append(overall_rate(run))
    measured.throttled.append(throttled / wall)
    measured.cores.append(cpu / wall)


def judge(findings: Findings, cores: float, results: Results) -> None:
    """Check the throttling.

    None is allowed where threads fit into the quota. Otherwise it may not exceed the best peer's, and the speed may
    not be below that peer's.
    """
    rows = [
        (f"×{clients}", name, f"{of.rate():.1f}", f"{of.rate() / cores:.1f}", f"{statistics.median(of.cores):.2f}",
         f"{of.stopped():.1%}")
        for clients, servers in results.items()
        for name, of in servers.items()
    ]  # fmt: skip
    findings.table(f"{cores:g} cores", ("clients", "server", "tok/s", "tok/s a core", "cores used", "throttled"), rows)
    full = results[CLIENTS[-1]]
    own, peers = full["ours"], {name: of for name, of in full.items() if name != "ours"}
    if cores in WHOLE:
        found = f"{own.stopped():.2%} of the run"
        findings.check(
            f"{cores:g} cores, full load: throttled", own.stopped() < MOST_THROTTLED, found, f"< {MOST_THROTTLED:.0%}"
        )
    elif peers:
        most = max(MOST_THROTTLED, min(of.stopped() for of in peers.values()))
        found, wanted = f"{own.stopped():.1%} of the run", f"<= {most:.1%}, the best peer's or what counts as none"
        findings.check(f"{cores:g} cores, full load: throttled", own.stopped() <= most * (1 + NOISE), found, wanted)
    if peers:
        name, best = max(peers.items(), key=lambda each: each[1].rate())
        share = own.rate() / best.rate()
        findings.check(
            f"{cores:g} cores, full load: speed", share >= 1 - NOISE, f"{share:.2f} of {name}'s", f">= {1 - NOISE:.2f}"
        )
