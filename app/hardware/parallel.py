"""How many threads of each kind, on which CPUs of which memory node, and how they wait for one another.

One runnable thread more than there are cores (or quota) makes every barrier wait for a scheduler's slice: a product of 0.3 ms then takes 8.
So all pools together are sized from what the process may really use, rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, count
from app.hardware.facts import Core, Facts
from app.hardware.trials import NOTHING, Trials
from app.settings import Settings

MIN_GAIN = 1.03  # times as quick: for less, a thread fewer is not worth the speed it might have on another day
_HOST_THREADS = 4  # beside a device
CONTENDED_GAIN = 1.3  # no kernel of ours loses so much by a thread more where each has a core to itself

# How often libgomp's threads look for work before they sleep: a tenth of a millisecond. Measured on two Zen 5 cores (llama-1b int4, decode
# ×8): in quiet 300000 (its own default, 3 ms) and 10000 took 19.3 ms a step, sleeping at once 21.7; beside a process that ran for 3 ms of
# every 23 they took 101, 22.8 and 24.0: a partner that lost its core is waited for asleep, which gives it one.
_SPINS = 10_000

# How compute threads wait at a barrier, by the word of `Parallelism.wait_policy`: what their pools read when torch is imported. With
# ACTIVE alone libgomp would spin for minutes, and an idle server would burn its cores. KMP is LLVM's OpenMP, which torch brings on
# macOS, in whole milliseconds.
WAITING: Mapping[str, Mapping[str, str]] = {
    "active": {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": str(_SPINS), "KMP_BLOCKTIME": "1"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
# Which of them where: a thread to each core, more threads than cores, more threads than the quota pays for.
_WAITS: Mapping[str, tuple[str, str]] = {
    "alone": (
        "active",
        "Each thread has a core to itself: it spins for a tenth of a millisecond between products, then sleeps, which gives a "
        "partner that lost its core another.",
    ),
    "crowded": ("passive", "There are more threads than cores: one that spins would hold up another."),
    "throttled": ("passive", "Spinning would burn the quota of {quota:g} cores."),
}


@dataclass(frozen=True, slots=True)
class Parallelism:
    threads: Decision[int]
    cpu_ids: Decision[tuple[int, ...]]
    numa_node: Decision[int | None]
    wait_policy: Decision[str]
    throttling_quota: Decision[float | None]
    interop_threads: Decision[int]
    tokenizer_threads: Decision[int]
    http_threads: Decision[int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where compute threads may run: `cores` hold only allowed CPUs, on one memory node where there are several."""

    cores: tuple[Core, ...]
    node: Decision[int | None]
    skipped: str  # what was left out, for the sentence


def decide(facts: Facts, settings: Settings, trials: Trials = NOTHING, precision: str = "") -> Parallelism:
    """As many threads as may serve, or fewer where that was measured to be quicker in this precision."""
    place = _place(facts, settings)
    threads = _threads(facts, settings, place)
    if settings.threads == "auto":
        threads = _fewer_where_quicker(threads, trials, precision)
    return Parallelism(
        threads=threads,
        cpu_ids=_cpu_ids(facts, threads.value, place),
        numa_node=place.node,
        wait_policy=_wait_policy(facts, threads.value, place),
        throttling_quota=_throttling_quota(facts, threads.value),
        **_small_pools(facts),
    )


def decide_on_device(facts: Facts, settings: Settings) -> Parallelism:
    """The host reads weights and prepares steps; one thread feeds the device, and nothing may keep it from a core."""
    anywhere = Place(_allowed_cores(facts), Decision(None, "The device computes: the host's threads may run anywhere."), "")
    place = anywhere if settings.numa_node == "auto" else _place(facts, settings)
    few = min(_HOST_THREADS, max(1, math.floor(_budget(facts))))
    threads = Decision(few, f"The device computes: for weights while they are read, and little else, within {_allowance(facts)}.")
    if settings.threads != "auto":
        threads = _forced_threads(facts, settings.threads, len(place.cores))
    unbound: Decision[tuple[int, ...]] = Decision((), "The device computes: the kernel knows which cores are idle.")
    return Parallelism(
        threads=threads,
        cpu_ids=unbound if settings.numa_node == "auto" else _cpu_ids(facts, threads.value, place),
        numa_node=place.node,
        wait_policy=Decision("passive", "Spinning would keep cores from the thread that feeds the device."),
        throttling_quota=Decision(None, "The device computes: seconds are the clock's."),
        **_small_pools(facts),
    )


def _small_pools(facts: Facts) -> dict[str, Decision[int]]:
    """Those that have nothing to do with products."""
    small = min(4, max(1, math.floor(_budget(facts))))
    return {
        "interop_threads": Decision(1, "One step runs at a time; a second pool would fight the first for its cores."),
        "tokenizer_threads": Decision(
            small, f"Text becomes tokens beside the step: up to 4 threads, within {_allowance(facts)}."
        ),
        "http_threads": Decision(
            small, f"Handlers are asynchronous; what blocks is rare: up to 4 threads, within {_allowance(facts)}."
        ),
    }


def _allowed_cores(facts: Facts) -> tuple[Core, ...]:
    """Physical cores with the logical CPUs that this process may use; a core with none is left out."""
    allowed = facts.allowed_cpus
    kept = [(core, tuple(cpu for cpu in core.cpu_ids if cpu in allowed)) for core in facts.cores]
    found = tuple(Core(cpus, core.package, core.numa_node, core.kind) for core, cpus in kept if cpus)
    if not found:
        raise PlanImpossible("The affinity mask and the cpuset have no CPU in common that is online: there is nothing to run on.")
    return found


def _place(facts: Facts, settings: Settings) -> Place:
    cores = _allowed_cores(facts)
    fast = tuple(core for core in cores if core.kind == "performance")
    skipped = (
        f"; {count(len(cores) - len(fast), 'efficiency core')} would hold the others up"
        if fast and len(fast) < len(cores)
        else ""
    )
    cores = fast or cores
    nodes = sorted({core.numa_node for core in cores})
    if settings.numa_node != "auto":
        return Place(_on_forced_node(settings, cores, nodes), Decision(settings.numa_node, "Asked for."), skipped)
    if len(nodes) == 1:
        return Place(cores, Decision(None, "There is one memory node."), skipped)
    if settings.threads != "auto" and settings.threads > max(len(_of_node(cores, node)) for node in nodes):
        return Place(
            cores, Decision(None, f"{settings.threads} threads were asked for, more than any memory node has cores."), skipped
        )
    best = _best_node(facts, settings, cores, nodes)
    reason = (
        f"Of {len(nodes)} memory nodes this one has the cores for it and the most available memory. Reading weights from another node "
        "costs more than its cores are worth; memory lands here by first touch. Run one process a node to use the rest."
    )
    return Place(_of_node(cores, best), Decision(best, reason), skipped)


def _on_forced_node(settings: Settings, cores: tuple[Core, ...], nodes: list[int]) -> tuple[Core, ...]:
    assert settings.numa_node != "auto", "only a node that was asked for"
    if settings.numa_node not in nodes:
        known = ", ".join(str(node) for node in nodes)
        raise PlanImpossible(f"numa_node is {settings.numa_node}, but this process may only compute on: {known}.")
    found = _of_node(cores, settings.numa_node)
    logical = sum(len(core.cpu_ids) for core in found)
    if settings.threads != "auto" and settings.threads > logical:
        raise PlanImpossible(
            f"threads is {settings.threads}, but memory node {settings.numa_node} has {count(logical, 'logical CPU')} for us."
        )
    return found


def _best_node(facts: Facts, settings: Settings, cores: tuple[Core, ...], nodes: list[int]) -> int:
    """Enough cores for what will run come first, then memory that may be taken: two services under a quota land on different nodes."""
    quota = facts.cgroup.quota_cores
    wanted = settings.threads if settings.threads != "auto" else max(1, math.floor(quota)) if quota is not None else len(cores)
    memory = {node.id: node.memory_bytes if node.available_bytes is None else node.available_bytes for node in facts.numa_nodes}
    if facts.memory_node_ids:
        memory = {node: size if node in facts.memory_node_ids else 0 for node, size in memory.items()}
    return max(nodes, key=lambda node: (min(wanted, len(_of_node(cores, node))), memory.get(node, 0), -node))


def _of_node(cores: tuple[Core, ...], node: int) -> tuple[Core, ...]:
    return tuple(core for core in cores if core.numa_node == node)


def _threads(facts: Facts, settings: Settings, place: Place) -> Decision[int]:
    quota = facts.cgroup.quota_cores
    cores = len(place.cores)
    if settings.threads != "auto":
        return _forced_threads(facts, settings.threads, cores)
    where = f"{count(cores, 'physical core')} may be used" + (
        f" on memory node {place.node.value}" if place.node.value is not None else ""
    )
    siblings = (
        "; SMT siblings share a core's multipliers and are left alone"
        if any(len(core.cpu_ids) > 1 for core in place.cores)
        else ""
    )
    if quota is not None and quota < cores:
        down = "" if quota.is_integer() else ", rounded down: one thread too many has all of them throttled"
        return Decision(max(1, math.floor(quota)), f"The CPU quota is {quota:g} cores{down}; {where}{siblings}.")
    return Decision(cores, f"{where}{place.skipped}{siblings}.")


def _fewer_where_quicker(planned: Decision[int], trials: Trials, precision: str) -> Decision[int]:
    now = trials.at(precision, planned.value)
    fewer = trials.fewer_threads(precision, planned.value)
    if now is None or not fewer:
        return planned
    best = max(fewer, key=lambda timing: timing.gain_over(now))
    gain, threads = best.gain_over(now), count(best.trial.threads, "thread")
    if gain < MIN_GAIN:
        slower = f"{threads} would take {1 / gain:.2f} times as long" if gain <= 1 else f"{threads} would gain under 3%"
        return Decision(planned.value, f"{planned.reason[:-1]}; {slower}, as measured.")
    tokens = best.prompt_tokens(now)
    busy = " So much is a sign of other work on these cores." if gain > CONTENDED_GAIN else ""
    return Decision(
        best.trial.threads,
        f"Measured with {threads} {best.figures(tokens)}, with {planned.value} {now.figures(tokens)}: fewer are {gain:.2f} times as quick."
        f"{busy} {planned.reason}",
    )


def _forced_threads(facts: Facts, threads: int, cores: int) -> Decision[int]:
    """Honoured up to the logical CPUs that there are, with a warning where it will hurt."""
    allowed = len(facts.allowed_cpus)
    if threads > allowed:
        raise PlanImpossible(f"threads is {threads}, but this process may use only {count(allowed, 'logical CPU')}.")
    quota = facts.cgroup.quota_cores
    if quota is not None and threads > quota:
        return Decision(threads, f"Asked for; the CPU quota is {quota:g} cores, so all threads will be throttled together.")
    return Decision(
        threads, "Asked for." if threads <= cores else f"Asked for; that is more than {count(cores, 'physical core')}."
    )


def _cpu_ids(facts: Facts, threads: int, place: Place) -> Decision[tuple[int, ...]]:
    """The mask that the compute threads are confined to; empty where it would change nothing or where the kernel knows better."""
    if facts.os != "linux":
        return Decision((), "This system does not bind threads to CPUs.")
    quota = facts.cgroup.quota_cores
    shared = quota is not None and quota < len(place.cores)
    if shared and place.node.value is None:
        return Decision(
            (), "The quota is less than the cores: others run on them too, and the kernel knows better which are idle."
        )
    use_siblings = shared or threads > len(place.cores)
    chosen = {cpu for core in place.cores for cpu in (core.cpu_ids if use_siblings else core.cpu_ids[:1])}
    if chosen == facts.allowed_cpus:
        return Decision((), "The threads may use every CPU that this process may use.")
    if use_siblings:
        return Decision(tuple(sorted(chosen)), "All CPUs of the memory node; which of them is the kernel's choice.")
    return Decision(
        tuple(sorted(chosen)),
        "One CPU of each core, so that no two threads share one; the others are left to the rest of the process.",
    )


def _wait_policy(facts: Facts, threads: int, place: Place) -> Decision[str]:
    quota = facts.cgroup.quota_cores
    case = "throttled" if quota is not None and threads > quota else "crowded" if threads > len(place.cores) else "alone"
    policy, reason = _WAITS[case]
    return Decision(policy, reason.format(quota=quota))


def _throttling_quota(facts: Facts, threads: int) -> Decision[float | None]:
    quota = facts.cgroup.quota_cores
    if quota is None or threads <= quota:
        return Decision(None, "No thread is stopped by a quota: seconds are the clock's.")
    return Decision(
        quota,
        f"{count(threads, 'thread')} on a quota of {quota:g} cores: stopped for part of each period, so steps are timed by the CPU and "
        "told as the quota makes them.",
    )


def _budget(facts: Facts) -> float:
    cores = len(_allowed_cores(facts))
    quota = facts.cgroup.quota_cores
    return cores if quota is None else min(quota, cores)


def _allowance(facts: Facts) -> str:
    quota = facts.cgroup.quota_cores
    cores = len(_allowed_cores(facts))
    return f"the quota of {quota:g} cores" if quota is not None and quota < cores else f"the {count(cores, 'core')}"
