"""A comparison published by others: its machines as it states them, and the same rates at listed prices and watts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from armature_bench.tco.capacity import ServingTarget
from armature_bench.tco.declared import CostDifference, DeclaredCost, DeclaredMachine, cost_difference, declared_costs
from armature_bench.tco.prices import HOURS_A_YEAR, PriceTable

SOURCE = "https://engineersofai.com/docs/foundational-cs/computer-architecture/arm-vs-x86-for-ai-workloads"
PUBLISHED_TARGET = ServingTarget(10_000.0)
MAC_STUDIO = "mac-studio-m2-ultra"

# BERT-Large in FP32, batch 1. The page states neither a price nor a p99 for the Mac.
PUBLISHED_MACHINES = (
    DeclaredMachine("c6i.4xlarge", 30, 35, 70, 0.68),
    DeclaredMachine("c7g.4xlarge", 42, 26, 38, 0.58),
    DeclaredMachine("c6i.16xlarge", 120, 31, 270, 2.72),
    DeclaredMachine("c7g.16xlarge", 165, 23, 150, 2.09),
    DeclaredMachine(MAC_STUDIO, 95, None, 60, None),
)
PUBLISHED_PAIRS = (("c6i.4xlarge", "c7g.4xlarge"), ("c6i.16xlarge", "c7g.16xlarge"))  # x86 and Arm of one size


@dataclass(frozen=True, slots=True)
class PublishedComparison:
    """The costs by one set of prices and watts, and Arm against x86 of each size."""

    costs: tuple[DeclaredCost, ...]
    differences: tuple[CostDifference, ...]

    def of(self, name: str) -> DeclaredCost:
        return next(cost for cost in self.costs if cost.machine.name == name)


def published_comparison(
    target: ServingTarget = PUBLISHED_TARGET,
    hours_a_year: float = HOURS_A_YEAR,
    machines: Sequence[DeclaredMachine] = PUBLISHED_MACHINES,
) -> PublishedComparison:
    """Return the comparison by the page's own inputs, for a target of samples."""
    costs = declared_costs(machines, target, hours_a_year)
    named = {cost.machine.name: cost for cost in costs}
    pairs = [(named[x86], named[arm]) for x86, arm in PUBLISHED_PAIRS if x86 in named and arm in named]
    return PublishedComparison(costs, tuple(cost_difference(x86, arm) for x86, arm in pairs))


def machines_as_listed(prices: PriceTable, hours_a_year: float = HOURS_A_YEAR) -> tuple[DeclaredMachine, ...] | None:
    """Return the page's machines with the price table's prices and watts, or None if the table lacks one of them."""
    found = [prices.find(machine.name) for machine in PUBLISHED_MACHINES]
    listed = tuple(
        replace(machine, dollars_an_hour=each[1].hourly_cost(hours_a_year), watts=each[0].watts(each[1]))
        for machine, each in zip(PUBLISHED_MACHINES, found, strict=True)
        if each is not None
    )
    return listed if len(listed) == len(found) and all(each.dollars_an_hour for each in listed) else None


def comparison_to_json(comparison: PublishedComparison) -> dict[str, Any]:
    return {"lines": costs_to_json(comparison.costs), "differences": differences_to_json(comparison.differences)}


def costs_to_json(costs: Sequence[DeclaredCost]) -> list[dict[str, Any]]:
    return [
        {
            "name": cost.machine.name,
            "rate": cost.machine.rate,
            "p99_ms": cost.machine.p99_ms,
            "watts": cost.machine.watts,
            "dollars_an_hour": cost.machine.dollars_an_hour,
            "rate_per_watt": cost.machine.rate_per_watt,
            "exactly": cost.exactly,
            "machines": cost.machines,
            "annual_dollars": cost.annual_dollars,
            "dollars_per_million": cost.dollars_per_million,
            "all_watts": cost.watts,
        }
        for cost in costs
    ]


def differences_to_json(differences: Sequence[CostDifference]) -> list[dict[str, Any]]:
    return [
        {
            "first": each.first.machine.name,
            "second": each.second.machine.name,
            "annual_dollars": each.dollars,
            "dollars_share": each.dollars_share,
            "p99_share": each.p99_share,
            "watts_share": each.watts_share,
        }
        for each in differences
    ]
