"""Division of the memory among several models: each gets what it needs, and a share of the rest for keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import format_bytes
from app.hardware.facts import Facts, Needs
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
