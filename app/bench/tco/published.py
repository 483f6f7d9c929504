"""A comparison published by others, computed again from its inputs, with a review.

The inputs are quoted at second hand. Only the first paragraphs of the page that they appear to come from were readable
when this was written, so its printed dollars per year were not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.bench.tco.prices import PriceTable
from app.bench.tco.sizing import annual_dollars, dollars_per_million, machines_needed

SOURCE = "https://engineersofai.com/docs/foundational-cs/computer-architecture/arm-vs-x86-for-ai-workloads"
SAMPLES_PER_SECOND = 10_000.0
OPENING_INSTANCES = ("c5.9xlarge", "c7g.8xlarge")  # claimed in its first sentences: 20% more throughput, 40% less cost
USABLE_RATIO = 0.7  # usable share of a machine; operators keep the rest for peaks and failed machines


@dataclass(frozen=True, slots=True)
class PublishedClaim:
    """A machine as the article describes it."""

    instance: str
    samples_per_second: float
    dollars_an_hour: float


CLAIMS = (PublishedClaim("c6i.16xlarge", 120, 2.72), PublishedClaim("c7g.16xlarge", 165, 2.09))


@dataclass(frozen=True, slots=True)
class PublishedCost:
    """The cost of `SAMPLES_PER_SECOND` all year by one claim. `exactly`: machines before rounding up."""

    claim: PublishedClaim
    exactly: float
    machines: int
    annual_dollars: float
    dollars_per_million: float


def published_costs() -> tuple[PublishedCost, ...]:
    """Return the costs by the published inputs."""
    return claim_costs(CLAIMS)


def claim_costs(claims: Sequence[PublishedClaim]) -> tuple[PublishedCost, ...]:
    """Return the costs by each claim."""
    return tuple(_claim_cost(claim) for claim in claims)


def costs_at_list_prices(prices: PriceTable) -> tuple[PublishedCost, ...] | None:
    """Return the costs at the same rates and the prices of the table, or None if it lacks one of them."""
    dollars = [_price(prices, claim.instance) for claim in CLAIMS]
    return (
        claim_costs([replace(claim, dollars_an_hour=each) for claim, each in zip(CLAIMS, dollars, strict=True) if each])
        if all(dollars)
        else None
    )


def saving_ratio(pair: Sequence[PublishedCost]) -> float:
    """Return by what share the second is cheaper than the first."""
    x86, arm = pair
    return 1 - arm.annual_dollars / x86.annual_dollars


def published_remarks(prices: PriceTable) -> list[str]:
    """Return a review of the published figures, one or two sentences for each point."""
    pair = published_costs()
    said = [_whole_machines(pair), _its_own_dollars(pair)]
    said += [text for text in (_its_price(prices, pair), _its_opening(prices), _its_gap(prices)) if text]
    return [*said, _its_cores()]


def _claim_cost(claim: PublishedClaim) -> PublishedCost:
    machines = machines_needed(SAMPLES_PER_SECOND, claim.samples_per_second)
    annual = annual_dollars(machines, claim.dollars_an_hour)
    exactly = SAMPLES_PER_SECOND / claim.samples_per_second
    return PublishedCost(claim, exactly, machines, annual, dollars_per_million(annual, SAMPLES_PER_SECOND))


def _price(prices: PriceTable, instance: str) -> float | None:
    found = prices.find(instance)
    return None if found is None else found[1].dollars_an_hour


def _whole_machines(pair: Sequence[PublishedCost]) -> str:
    counts = " and ".join(f"{line.exactly:.1f} is {line.machines}" for line in pair)
    roomy = " and ".join(
        str(machines_needed(SAMPLES_PER_SECOND, line.claim.samples_per_second * USABLE_RATIO)) for line in pair
    )
    return (
        f"Right: in whole machines {counts}. But each then runs at 99% all year, and latency is not mentioned: "
        f"with {1 - USABLE_RATIO:.0%} reserved for peaks and failed machines it would be {roomy}."
    )


def _its_own_dollars(pair: Sequence[PublishedCost]) -> str:
    dollars = " and ".join(f"${line.annual_dollars:,.0f}" for line in pair)
    return (
        f"Its inputs give {dollars} a year, {saving_ratio(pair):.1%} less. Only the beginning of the page was readable, "
        "so its printed results are unknown; if they differ, they do not follow from its inputs."
    )


def _its_price(prices: PriceTable, pair: Sequence[PublishedCost]) -> str | None:
    found, listed = prices.find(CLAIMS[1].instance), costs_at_list_prices(prices)
    if found is None or listed is None:
        return None
    family, arm = found[0], listed[1]
    return (
        f"Wrong: {arm.claim.instance} does not cost {CLAIMS[1].dollars_an_hour} dollars on demand, but {arm.claim.dollars_an_hour:g} "
        f"in {family.region} (as of {family.as_of}). At list prices it is ${arm.annual_dollars:,.0f} against "
        f"${listed[0].annual_dollars:,.0f}: {saving_ratio(listed):.1%} less, not {saving_ratio(pair):.1%}."
    )


def _its_opening(prices: PriceTable) -> str | None:
    x86, arm = (_price(prices, instance) for instance in OPENING_INSTANCES)
    if not x86 or not arm:
        return None
    return (
        f"Wrong: its opening says that {OPENING_INSTANCES[1]} serves 20% more than {OPENING_INSTANCES[0]} "
        f"at 40% less cost. At {arm:g} and {x86:g} dollars "
        f"an hour the same work costs {1 - arm / x86 / 1.2:.1%} less, and each machine {1 - arm / x86:.1%} less."
    )


def _its_gap(prices: PriceTable) -> str | None:
    arm = _price(prices, "c7g.16xlarge")
    others = {name: price for name in ("c6i", "c7i", "c7a") if (price := _price(prices, f"{name}.16xlarge"))}
    if not arm or not others:
        return None
    gaps = ", ".join(f"{1 - arm / price:.0%} less than {name}" for name, price in others.items())
    return f"Wrong: it says that Graviton3 costs 20 to 40% less than an equal x86. With 64 vCPUs, c7g costs {gaps}."


def _its_cores() -> str:
    x86, arm = CLAIMS
    return (
        f"Omitted: 64 vCPUs are 32 cores of {x86.instance} and 64 of {arm.instance}. A core of the first does "
        f"{x86.samples_per_second / 32:.2f} samples/s, one of the second {arm.samples_per_second / 64:.2f}: "
        "the saving comes from the price per core."
    )
