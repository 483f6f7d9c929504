"""Division of a machine: of its memory among several models, and of its GPUs or cores among engines of one model.

Each model gets what it needs, and a share of the rest for keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.errors import PlanImpossible
from app.hardware.decision import format_bytes
from app.hardware.facts import Facts, Needs
from app.hardware.plan.devices import suited_gpus
from app.hardware.plan.memory_budget import MemoryDemand, find_device_memory, memory_budget, useful_kv_cache_bytes
from app.hardware.plan.plan import ServingPlan
from app.settings import Settings

_SLACK_DIVISOR = 16  # a plan leaves at most 1/16 of its memory


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """Bytes of a model that was planned alone, in the memory of its device, of which `available` are there.

    `fixed` are those it cannot do without, `least` those with a useful KV cache, `total` those of its plan.
    """

    device: str
    available: int
    fixed: int
    least: int
    total: int


def memory_wish(facts: Facts, settings: Settings, plan: ServingPlan, needs: Needs) -> MemoryWish:
    kind = plan.placement.device
    device = find_device_memory(facts, settings, kind, plan.gpu(facts))
    weights = plan.weights
    demand = MemoryDemand(needs, weights.precision, weights.kv_precision, int8_copy=weights.int8_copy, device=device)
    left = memory_budget(facts, demand, plan.memory.max_batch_tokens, plan.memory.max_running_seqs)
    slack = left.available // _SLACK_DIVISOR if device is None else device.slack_bytes
    fixed, kv_bytes = left.available - left.size - slack, plan.memory.kv_cache_bytes
    useful = min(kv_bytes, useful_kv_cache_bytes(settings, demand))
    return MemoryWish(kind, left.available, *(_with_slack(fixed + more) for more in (0, useful, kv_bytes)))


def _with_slack(size: int) -> int:
    return size * _SLACK_DIVISOR // (_SLACK_DIVISOR - 1)


def divide_memory(wishes: Mapping[str, MemoryWish], available: int) -> dict[str, int]:
    """Return the share of each model, none if all plans fit. Raises `PlanImpossible` if the models do not fit.

    What the models can do without is divided in proportion to the keys and values that each would keep.
    """
    fixed = sum(wish.fixed for wish in wishes.values())
    flexible = sum(wish.total - wish.fixed for wish in wishes.values())
    if fixed + flexible <= available:
        return {}
    if fixed > available:
        each = ", ".join(f"{name} {format_bytes(wish.fixed)}" for name, wish in wishes.items())
        raise PlanImpossible(
            f"The models do not fit together: {each} are needed, and {format_bytes(available)} are available. Load some of"
            " them on demand (load in a model's table), or serve fewer models or smaller precisions."
        )
    rest = available - fixed
    return {name: wish.fixed + rest * (wish.total - wish.fixed) // flexible for name, wish in wishes.items()}


def divide_machine(facts: Facts, device: str, number: int) -> tuple[Facts, ...]:
    """Return the part of a machine that each of several engines has. Raises `PlanImpossible` if it is too small."""
    if number == 1:
        return (facts,)
    if device == "cuda":
        gpus = suited_gpus(facts)
        if len(gpus) < number:
            raise PlanImpossible(f"data_parallel is {number}, but the usable GPUs of this machine are {len(gpus)}.")
        return tuple(replace(facts, cuda=(gpu,)) for gpu in gpus[:number])
    if device != "cpu":
        raise PlanImpossible(f"data_parallel is {number}, but the device is {device}, of which there is one.")
    allowed, nodes = facts.allowed_cpus, [core.numa_node for core in facts.cores]
    cores = [tuple(cpu for cpu in core.cpu_ids if cpu in allowed) for core in facts.cores]
    ordered = [cpus for _, cpus in sorted(zip(nodes, cores, strict=True)) if cpus]
    if len(ordered) < number:
        ordered = [(cpu,) for cpus in ordered for cpu in cpus]
    if len(ordered) < number:
        raise PlanImpossible(f"data_parallel is {number}, but this process may use only {len(ordered)} logical CPUs.")
    return tuple(_part(facts, ordered, place, number) for place in range(number))


def _part(facts: Facts, ordered: Sequence[tuple[int, ...]], place: int, number: int) -> Facts:
    """Return the part of a processor that an engine has: neighboring cores, and as large a share of the memory as any."""
    cores = ordered[place * len(ordered) // number : (place + 1) * len(ordered) // number]
    group = facts.cgroup
    memory, quota = group.memory_available_bytes, group.quota_cores
    return replace(
        facts,
        affinity=tuple(cpu for cpus in cores for cpu in cpus),
        available_bytes=facts.available_bytes // number,
        cgroup=replace(
            group,
            memory_available_bytes=None if memory is None else memory // number,
            quota_cores=None if quota is None else quota / number,
        ),
    )
