"""The fleets that a run of `python -m tools.fleet_day` compares, at the same traffic, and the changes to one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tools.fleet_day.autoscaler import MIXED, RUNNING, ScalingRules, read_rules
from tools.fleet_day.pools import Pool
from tools.fleet_day.simulation import FleetPlan, PoolPlan, Spot, Starts
from tools.fleet_day.traffic import Traffic

MIXED_NAME = "mixed"
SIZES = (10, 100, 1_000, 10_000)
PEAK_LOAD = 0.7  # share of the reference pool's capacity that the peak takes, if it has as many pods as the size says
WARM = Starts(machine=0.0, image=0.0, model=5.0)  # docs/proofs.md: 4 to 6 s on a node that has the cache


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and the traffic of `pods` reference pods. `table` groups rows of the output."""

    table: str
    name: str
    pods: int
    plan: FleetPlan


@dataclass(frozen=True, slots=True)
class Fleets:
    """What all scenarios of a run share. The last pool is the reference for the size of the traffic."""

    pools: Mapping[str, Pool]
    traffic: Traffic
    starts: Starts
    spot: Spot
    balancer: str = "wait"
    most_simulated: int = 32

    def alone(self, name: str, pods: int) -> FleetPlan:
        """Return a fleet of one pool with the component's autoscaler and no limit that matters."""
        return self._plan({name: replace(read_rules(), max_pods=3 * pods)}, pods)

    def mixed(self, pods: int) -> FleetPlan:
        """Return the fleet of the mixed overlay: the first pool grows first, up to two thirds of `pods`.

        The overlay's limits are 8 pods of 12. With fewer machines of the first kind than are needed, the second helps.
        """
        cheap, dear = list(self.pools)[:2]
        rules = {
            cheap: replace(read_rules(patch=MIXED / "arm64" / "scaling.yaml"), max_pods=max(2, 2 * pods // 3)),
            dear: replace(read_rules(patch=MIXED / "amd64" / "scaling.yaml"), max_pods=3 * pods),
        }
        return self._plan(rules, pods)

    def _plan(self, rules: Mapping[str, ScalingRules], pods: int) -> FleetPlan:
        traffic = self._traffic(pods)
        rest, plans = traffic.peak_rate * traffic.shape(0.0) / PEAK_LOAD, []
        for name, each in rules.items():
            rate = self._rate(name)
            first = min(max(each.min_pods, math.ceil(rest / rate)), each.max_pods)
            rest = max(0.0, rest - first * rate)
            plans.append(PoolPlan(self.pools[name], each, first))
        return FleetPlan(
            tuple(plans), traffic, self.balancer, self.starts, self.spot, most_simulated=self.most_simulated
        )

    def _traffic(self, pods: int) -> Traffic:
        return replace(self.traffic, peak_rate=PEAK_LOAD * pods * self._rate(list(self.pools)[-1]))

    def _rate(self, name: str) -> float:
        return self.pools[name].requests_per_second(self.traffic.prompts.mean, self.traffic.completions.mean)


def by_size(fleets: Fleets, sizes: tuple[int, ...]) -> Iterator[Scenario]:
    """Yield each pool alone and, if there are two, both, for each size: as configured, then scaled by waits alone."""
    plans = {
        (pods, name): fleets.mixed(pods) if name == MIXED_NAME else fleets.alone(name, pods)
        for pods in sizes
        for name in (*fleets.pools, *([MIXED_NAME] if len(fleets.pools) > 1 else []))
    }
    for (pods, name), plan in plans.items():
        yield Scenario("sizes", name, pods, plan)
    for (pods, name), plan in plans.items():
        yield Scenario("waits", name, pods, by_waits_alone(plan))


def changes(fleets: Fleets, pods: int) -> Iterator[Scenario]:
    """Yield the mixed fleet with changes to its machines, and with changes to its autoscalers."""
    plan = fleets.mixed(pods)
    waits = by_waits_alone(plan)
    half = replace(plan.spot, share=0.5)
    slow = replace(plan.starts, machine=300.0)
    variants = {
        "as configured": plan,
        "new pods ready after 5 s": replace(plan, starts=WARM),
        "new machines after 5 minutes": replace(plan, starts=slow),
        "half of the pods on spot machines": replace(plan, spot=half),
        "the same, lost without notice": replace(plan, spot=replace(half, notice=0.0)),
        "balanced by chance": replace(plan, balancer="weights"),
        "by waits alone": waits,
        "by waits alone, new pods ready after 5 s": replace(waits, starts=WARM),
        "by waits alone, new machines after 5 minutes": replace(waits, starts=slow),
        "by waits alone, all targets halved": _with_rules(waits, _half_targets),
        "by waits alone, up once in 4 minutes": _with_rules(plan, lambda rules: _without_running(_slower_down(rules))),
        "by waits alone, down by 2% in 2 minutes": _with_rules(plan, lambda rules: _without_running(_faster_up(rules))),
        "by waits and 16 running requests": _with_rules(plan, lambda rules: _slower_down(_faster_up(rules))),
    }
    for name, each in variants.items():
        yield Scenario("changes", name, pods, each)


def arm_speeds(fleets: Fleets, pods: int, factors: tuple[float, ...]) -> Iterator[Scenario]:
    """Yield the first pool alone at other speeds than declared."""
    name, pool = next(iter(fleets.pools.items()))
    for factor in factors:
        changed = replace(fleets, pools={**fleets.pools, name: pool.faster(factor, f"declared: {factor:g} times")})
        yield Scenario("speeds", f"{name} at {factor:g} times its rates", pods, changed.alone(name, pods))


def by_waits_alone(plan: FleetPlan) -> FleetPlan:
    """Return the fleet with the manifests' first autoscalers: they see waits, not load, grow sooner and shrink by one."""
    return _with_rules(plan, lambda rules: _without_running(_slower_down(_faster_up(rules))))


def _with_rules(plan: FleetPlan, change: Callable[[ScalingRules], ScalingRules]) -> FleetPlan:
    return replace(plan, pools=tuple(replace(each, rules=change(each.rules)) for each in plan.pools))


def _faster_up(rules: ScalingRules) -> ScalingRules:
    return replace(rules, up=tuple(replace(each, period_seconds=120) for each in rules.up))


def _slower_down(rules: ScalingRules) -> ScalingRules:
    return replace(rules, down=tuple(each for each in rules.down if not each.percent))


def _without_running(rules: ScalingRules) -> ScalingRules:
    return replace(rules, targets={name: value for name, value in rules.targets.items() if name != RUNNING})


def _half_targets(rules: ScalingRules) -> ScalingRules:
    external = None if rules.external is None else rules.external / 2
    return replace(rules, targets={name: value / 2 for name, value in rules.targets.items()}, external=external)
