"""Decisions about threads: the size of each pool, their CPUs and memory node, and how they wait for each other.

With one runnable thread more than there are cores (or quota), every barrier waits for a scheduler's time slice: a
product of 0.3 ms then takes 8 ms. So all pools together are sized from what the process can really use, rounded
down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import ALL_KINDS, Decided, Decision, PlanPart, format_count
from app.hardware.facts import Core, Facts
from app.hardware.plan.speed import NO_TRIALS, TrialTimings
from app.settings import Settings

MIN_THREAD_GAIN = 1.03  # least speedup for which fewer threads are used; a smaller one may not last
_HOST_THREADS = 4  # if a GPU computes
_MIN_SERVICE_CORES = 2  # efficiency cores: one for the event loop, and one for a long text that is tokenized meanwhile
CONTENDED_GAIN = (
    1.3  # one more thread with its own core never costs a native kernel this factor, so other programs must be busy
)

# Spins of libgomp's threads before they sleep: about a tenth of a millisecond. Measured on two Zen 5 cores (llama-1b
# int4, decode ×8): on an idle machine 300000 (libgomp's default, 3 ms) and 10000 took 19.3 ms a step, and sleeping at
# once took 21.7. With another process that ran 3 ms of every 23, they took 101, 22.8 and 24.0: threads that sleep
# leave a core to the partner that lost its own.
_SPIN_COUNT = 10_000

# Environment variables for each value of `ThreadPlan.wait_policy`, which the thread pools read when torch is imported.
# With ACTIVE alone libgomp would spin for minutes, and an idle server would use its cores fully. KMP is LLVM's OpenMP,
# which torch contains on macOS; its unit is whole milliseconds.
WAIT_POLICY_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "active": {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": str(_SPIN_COUNT), "KMP_BLOCKTIME": "1"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
# Policy and reason for three cases: one core for each thread, more threads than cores, more threads than the quota
# allows.
_WAIT_POLICY_REASONS: Mapping[str, tuple[str, str]] = {
    "alone": (
        "active",
        "Each thread has a core to itself: it spins for a tenth of a millisecond between products, then sleeps, which leaves its "
        "core to a thread that lost its own.",
    ),
    "crowded": ("passive", "There are more threads than cores: a spinning thread would delay another."),
    "throttled": ("passive", "Spinning would use up the quota of {quota:g} cores."),
}


@dataclass(frozen=True)
class ThreadPlan(PlanPart):
    """Decisions about threads; empty masks: not pinned.

    The mask `cpu_ids` of the compute threads is set before their pool starts; `service_cpu_ids` is for the threads that
    serve HTTP, tokenize and log, once the model is loaded.
    """

    threads: Decided[int] = Decided(ALL_KINDS)
    cpu_ids: Decided[tuple[int, ...]] = Decided()
    numa_node: Decided[int | None] = Decided()
    wait_policy: Decided[str] = Decided(ALL_KINDS)
    throttling_quota: Decided[float | None] = Decided()
    interop_threads: Decided[int] = Decided()
    tokenizer_threads: Decided[int] = Decided()
    http_threads: Decided[int] = Decided()
    service_cpu_ids: Decided[tuple[int, ...]] = Decided()


@dataclass(frozen=True, slots=True)
class ComputeCores:
    """Allowed cores for compute threads, of one memory node if there are several; `skipped` is for a sentence."""

    cores: tuple[Core, ...]
    node: Decision[int | None]
    skipped: str


def decide_threads(
    facts: Facts, settings: Settings, trials: TrialTimings = NO_TRIALS, precision: str = ""
) -> ThreadPlan:
    """Decide the threads of a processor: all that are allowed, or fewer if fewer were measured to be faster."""
    compute_cores = _compute_cores(facts, settings)
    threads = _threads(facts, settings, compute_cores)
    if settings.threads == "auto":
        threads = _fewer_if_faster(threads, trials, precision)
    cpu_ids = _cpu_ids(facts, threads.value, compute_cores)
    return ThreadPlan(
        threads=threads,
        cpu_ids=cpu_ids,
        numa_node=compute_cores.node,
        wait_policy=_wait_policy(facts, threads.value, compute_cores),
        throttling_quota=_throttling_quota(facts, threads.value),
        service_cpu_ids=_service_cpu_ids(facts, cpu_ids),
        **_small_pools(facts),
    )


def decide_host_threads(facts: Facts, settings: Settings) -> ThreadPlan:
    """Decide the host's threads for a GPU: one submits work to the device, and must always get a core."""
    anywhere = ComputeCores(
        _allowed_cores(facts), Decision(None, "The GPU computes: the host's threads may run on any node."), ""
    )
    compute_cores = anywhere if settings.numa_node == "auto" else _compute_cores(facts, settings)
    few = min(_HOST_THREADS, max(1, math.floor(_core_budget(facts))))
    threads = Decision(
        few, f"The GPU computes: the host's threads mainly read weights, within {_core_budget_phrase(facts)}."
    )
    if settings.threads != "auto":
        threads = _forced_threads(facts, settings.threads, len(compute_cores.cores))
    unbound: Decision[tuple[int, ...]] = Decision((), "The GPU computes: the kernel chooses idle cores.")
    return ThreadPlan(
        threads=threads,
        cpu_ids=unbound if settings.numa_node == "auto" else _cpu_ids(facts, threads.value, compute_cores),
        numa_node=compute_cores.node,
        wait_policy=Decision("passive", "Spinning would take cores from the thread that submits work to the GPU."),
        throttling_quota=Decision(None, "The GPU computes: step times are not corrected for a quota."),
        service_cpu_ids=unbound,
        **_small_pools(facts),
    )


def _small_pools(facts: Facts) -> dict[str, Decision[int]]:
    """Decide the pools that do not compute matrix products."""
    small = min(4, max(1, math.floor(_core_budget(facts))))
    return {
        "interop_threads": Decision(
            1, "One step runs at a time; a second pool would compete with the first for cores."
        ),
        "tokenizer_threads": Decision(
            small, f"Text is tokenized while steps run: up to 4 threads, within {_core_budget_phrase(facts)}."
        ),
        "http_threads": Decision(
            small, f"Handlers are asynchronous and rarely block: up to 4 threads, within {_core_budget_phrase(facts)}."
        ),
    }


def _allowed_cores(facts: Facts) -> tuple[Core, ...]:
    allowed = facts.allowed_cpus
    allowed_cpus = [(core, tuple(cpu for cpu in core.cpu_ids if cpu in allowed)) for core in facts.cores]
    found = tuple(Core(cpus, core.package, core.numa_node, core.kind) for core, cpus in allowed_cpus if cpus)
    if not found:
        raise PlanImpossible(
            "The affinity mask and the cpuset have no CPU in common that is online, so there is no CPU to run on."
        )
    return found


def _compute_cores(facts: Facts, settings: Settings) -> ComputeCores:
    cores = _allowed_cores(facts)
    fast = tuple(core for core in cores if core.kind == "performance")
    skipped = (
        f"; {format_count(len(cores) - len(fast), 'efficiency core')} would delay the others"
        if fast and len(fast) < len(cores)
        else ""
    )
    cores = fast or cores
    nodes = sorted({core.numa_node for core in cores})
    if settings.numa_node != "auto":
        return ComputeCores(
            _on_forced_node(settings, cores, nodes), Decision(settings.numa_node, "Asked for."), skipped
        )
    if len(nodes) == 1:
        return ComputeCores(cores, Decision(None, "There is one memory node."), skipped)
    if settings.threads != "auto" and settings.threads > max(len(_cores_of_node(cores, node)) for node in nodes):
        return ComputeCores(
            cores,
            Decision(None, f"threads is {settings.threads}, which is more than the cores of any memory node."),
            skipped,
        )
    best = _best_node(facts, settings, cores, nodes)
    reason = (
        f"Of {len(nodes)} memory nodes, this one has enough cores and the most available memory. Reading weights from another node costs "
        "more than its cores gain. Memory is placed here by first touch. To use the other nodes, run one process on each."
    )
    return ComputeCores(_cores_of_node(cores, best), Decision(best, reason), skipped)


def _on_forced_node(settings: Settings, cores: tuple[Core, ...], nodes: list[int]) -> tuple[Core, ...]:
    assert settings.numa_node != "auto", "called only if numa_node is set"
    if settings.numa_node not in nodes:
        known = ", ".join(str(node) for node in nodes)
        raise PlanImpossible(f"numa_node is {settings.numa_node}, but this process may only compute on: {known}.")
    found = _cores_of_node(cores, settings.numa_node)
    logical = sum(len(core.cpu_ids) for core in found)
    if settings.threads != "auto" and settings.threads > logical:
        raise PlanImpossible(
            f"threads is {settings.threads}, but memory node {settings.numa_node} has "
            f"{format_count(logical, 'logical CPU')} for this process."
        )
    return found


def _best_node(facts: Facts, settings: Settings, cores: tuple[Core, ...], nodes: list[int]) -> int:
    quota = facts.cgroup.quota_cores
    wanted = (
        settings.threads
        if settings.threads != "auto"
        else max(1, math.floor(quota))
        if quota is not None
        else len(cores)
    )
    memory = {
        node.id: node.memory_bytes if node.available_bytes is None else node.available_bytes
        for node in facts.numa_nodes
    }
    if facts.memory_node_ids:
        memory = {node: size if node in facts.memory_node_ids else 0 for node, size in memory.items()}
    return max(nodes, key=lambda node: (min(wanted, len(_cores_of_node(cores, node))), memory.get(node, 0), -node))


def _cores_of_node(cores: tuple[Core, ...], node: int) -> tuple[Core, ...]:
    return tuple(core for core in cores if core.numa_node == node)


def _threads(facts: Facts, settings: Settings, compute_cores: ComputeCores) -> Decision[int]:
    quota = facts.cgroup.quota_cores
    cores = len(compute_cores.cores)
    if settings.threads != "auto":
        return _forced_threads(facts, settings.threads, cores)
    where = f"{format_count(cores, 'physical core')} may be used" + (
        f" on memory node {compute_cores.node.value}" if compute_cores.node.value is not None else ""
    )
    siblings = (
        "; SMT siblings share a core's multipliers and are not used"
        if any(len(core.cpu_ids) > 1 for core in compute_cores.cores)
        else ""
    )
    if quota is not None and quota < cores:
        down = "" if quota.is_integer() else ", rounded down: with one thread too many, all are throttled"
        return Decision(max(1, math.floor(quota)), f"The CPU quota is {quota:g} cores{down}; {where}{siblings}.")
    return Decision(cores, f"{where}{compute_cores.skipped}{siblings}.")


def _fewer_if_faster(planned: Decision[int], trials: TrialTimings, precision: str) -> Decision[int]:
    now = trials.find(precision, planned.value)
    fewer = trials.fewer_threads(precision, planned.value)
    if now is None or not fewer:
        return planned
    best = max(fewer, key=lambda timing: timing.speedup_over(now))
    gain, threads = best.speedup_over(now), format_count(best.trial.threads, "thread")
    if gain < MIN_THREAD_GAIN:
        slower = f"{threads} would take {1 / gain:.2f} times as long" if gain <= 1 else f"{threads} would gain under 3%"
        return Decision(planned.value, f"{planned.reason[:-1]}; {slower}, as measured.")
    tokens = best.compared_tokens(now)
    busy = " A gain of this size is a sign of other work on these cores." if gain > CONTENDED_GAIN else ""
    return Decision(
        best.trial.threads,
        f"Measured with {threads} {best.describe_rates(tokens)}, with {planned.value} "
        f"{now.describe_rates(tokens)}: fewer are {gain:.2f} times as fast."
        f"{busy} {planned.reason}",
    )


def _forced_threads(facts: Facts, threads: int, cores: int) -> Decision[int]:
    """Return the requested threads, up to the logical CPUs, with a warning in the reason if they cost speed."""
    allowed = len(facts.allowed_cpus)
    if threads > allowed:
        raise PlanImpossible(
            f"threads is {threads}, but this process may use only {format_count(allowed, 'logical CPU')}."
        )
    quota = facts.cgroup.quota_cores
    if quota is not None and threads > quota:
        return Decision(
            threads, f"Asked for; the CPU quota is {quota:g} cores, so all threads will be throttled together."
        )
    return Decision(
        threads,
        "Asked for." if threads <= cores else f"Asked for; that is more than {format_count(cores, 'physical core')}.",
    )


def _cpu_ids(facts: Facts, threads: int, compute_cores: ComputeCores) -> Decision[tuple[int, ...]]:
    """Decide the CPU mask of the compute threads; empty if it would change nothing or the kernel chooses better."""
    if facts.os != "linux":
        return Decision((), "This system cannot bind threads to CPUs.")
    quota = facts.cgroup.quota_cores
    shared = quota is not None and quota < len(compute_cores.cores)
    if shared and compute_cores.node.value is None:
        return Decision(
            (),
            "The quota is less than the cores: other processes run on them too, and the kernel knows which are idle.",
        )
    use_siblings = shared or threads > len(compute_cores.cores)
    chosen = {cpu for core in compute_cores.cores for cpu in (core.cpu_ids if use_siblings else core.cpu_ids[:1])}
    if chosen == facts.allowed_cpus:
        return Decision((), "The threads may use every CPU that this process may use.")
    if use_siblings:
        return Decision(tuple(sorted(chosen)), "All CPUs of the memory node; the kernel chooses among them.")
    return Decision(
        tuple(sorted(chosen)),
        "One CPU of each core, so that no two threads share one; the others are left to the rest of the process.",
    )


def _service_cpu_ids(facts: Facts, cpu_ids: Decision[tuple[int, ...]]) -> Decision[tuple[int, ...]]:
    """Decide the CPU mask of the threads that serve HTTP, tokenize and log: efficiency cores if there are any.

    It is only set beside a mask of the compute threads, which would inherit it otherwise.
    """
    if facts.os != "linux":
        return Decision((), cpu_ids.reason)
    cores, computing = _allowed_cores(facts), set(cpu_ids.value)
    small = [core for core in cores if core.kind == "efficiency" and not computing & set(core.cpu_ids)]
    if not small or all(core.kind == "efficiency" for core in cores):
        return Decision((), "There are not two kinds of cores: the kernel chooses.")
    if not computing:
        return Decision((), "The compute threads are not bound to CPUs: the kernel chooses for all threads.")
    if len(small) < _MIN_SERVICE_CORES:
        return Decision((), "One efficiency core is too few for HTTP and tokenizing: the kernel chooses.")
    return Decision(
        tuple(sorted(cpu for core in small for cpu in core.cpu_ids)),
        f"HTTP, tokenizing and logging use the {format_count(len(small), 'efficiency core')}, which leaves the "
        "performance cores to the compute threads.",
    )


def _wait_policy(facts: Facts, threads: int, compute_cores: ComputeCores) -> Decision[str]:
    quota = facts.cgroup.quota_cores
    case = (
        "throttled"
        if quota is not None and threads > quota
        else "crowded"
        if threads > len(compute_cores.cores)
        else "alone"
    )
    policy, reason = _WAIT_POLICY_REASONS[case]
    return Decision(policy, reason.format(quota=quota))


def _throttling_quota(facts: Facts, threads: int) -> Decision[float | None]:
    quota = facts.cgroup.quota_cores
    if quota is None or threads <= quota:
        return Decision(None, "No thread is throttled by a quota: step times are not corrected.")
    return Decision(
        quota,
        f"{format_count(threads, 'thread')} on a quota of {quota:g} cores are throttled in "
        "each period, so step times are CPU time divided by "
        "the quota.",
    )


def _core_budget(facts: Facts) -> float:
    cores = len(_allowed_cores(facts))
    quota = facts.cgroup.quota_cores
    return cores if quota is None else min(quota, cores)


def _core_budget_phrase(facts: Facts) -> str:
    quota = facts.cgroup.quota_cores
    cores = len(_allowed_cores(facts))
    return (
        f"the quota of {quota:g} cores" if quota is not None and quota < cores else f"the {format_count(cores, 'core')}"
    )
