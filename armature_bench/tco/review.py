"""A review of the published comparison: what follows from its inputs, where it contradicts itself, what is listed.

Each sentence shows its sum. "Contradicts itself" needs nothing but the page; "Wrong" needs the price table.
"""

from __future__ import annotations

from armature_bench.tco.prices import InstanceFamily, PriceTable
from armature_bench.tco.published import (
    MAC_STUDIO,
    PUBLISHED_TARGET,
    PublishedComparison,
    machines_as_listed,
    published_comparison,
)
from armature_bench.tco.sizing import machines_needed

X86, ARM = "c6i.16xlarge", "c7g.16xlarge"
SMALL_X86, SMALL_ARM = "c6i.4xlarge", "c7g.4xlarge"
OPENING_INSTANCES = ("c5.9xlarge", "c7g.8xlarge")  # claimed in its first sentences: 20% more throughput, 40% less cost
USABLE_RATIO = 0.7  # usable share of a machine; operators keep the rest for peaks and failed machines
X86_CORES, ARM_CORES = 32, 64  # of 64 vCPUs each
MAC_STUDIO_DOLLARS = 2000


def published_remarks(prices: PriceTable) -> list[str]:
    """Return the review, for the page's own target of 10,000 samples a second all year."""
    page = published_comparison()
    said = [_what_follows(page), _its_load(page), *_its_shares(page), _its_power(page), _its_ratings(page, prices)]
    against_list = (_its_price(page, prices), _its_opening(prices), _its_gap(prices), _its_mac(page, prices))
    return [*said, _its_sizes(), *(text for text in against_list if text), _its_cores(page)]


def _what_follows(page: PublishedComparison) -> str:
    x86, arm, mac = page.of(X86), page.of(ARM), page.of(MAC_STUDIO)
    counts = " and ".join(
        f"10,000/{cost.machine.rate:g} = {cost.exactly:.1f} is {cost.machines}" for cost in (x86, arm)
    )
    millions = " and ".join(f"{cost.dollars_per_million or 0:.1f}" for cost in (x86, arm))
    kilowatts = " and ".join(f"{(cost.watts or 0) / 1e3:.1f}" for cost in (x86, arm))
    per_watt = ", ".join(f"{cost.machine.rate_per_watt or 0:.2f}" for cost in (x86, arm, mac))
    one, other = x86.annual_dollars or 0, arm.annual_dollars or 0
    return (
        f"Right: in whole machines {counts}; ${one:,.0f} and ${other:,.0f} a year, ${one - other:,.0f} apart, the page's "
        f"$900,000; {millions} dollars a million; {kilowatts} kW; {per_watt} samples a second and watt. "
        f'Its "$1.11M" is {other / 1e6:.3f}.'
    )


def _its_load(page: PublishedComparison) -> str:
    roomy = " and ".join(
        str(machines_needed(PUBLISHED_TARGET.per_second, page.of(name).machine.rate * USABLE_RATIO))
        for name in (X86, ARM)
    )
    return (
        "Omitted: each machine then runs at 99% all year, and the page does not say at which load its p99 was taken. "
        f"With {1 - USABLE_RATIO:.0%} reserved for peaks and failed machines it would be {roomy} machines."
    )


def _its_shares(page: PublishedComparison) -> list[str]:
    x86, arm = page.of(X86).machine, page.of(ARM).machine
    price, rate = (arm.dollars_an_hour or 0) / (x86.dollars_an_hour or 1), arm.rate / x86.rate
    (share,) = (each.dollars_share or 0 for each in page.differences if each.first.machine == x86)
    return [
        f'Contradicts itself: "about 38% cheaper per instance" is 1 − 2.09/2.72 = {1 - price:.1%}. Its other 38%, of '
        f"throughput, is right: 165/120 − 1 = {rate - 1:.1%}.",
        f'Contradicts itself: "about 55%" combined is 1 − (2.09/165)/(2.72/120) = {1 - price / rate:.1%}, in whole machines '
        f"{share:.1%}. 55% needs both to be 38%: 1 − 0.62/1.38 = {1 - 0.62 / 1.38:.1%}.",
    ]


def _its_power(page: PublishedComparison) -> str:
    x86, arm = page.of(X86), page.of(ARM)
    a_sample = 1 - (x86.machine.rate_per_watt or 0) / (arm.machine.rate_per_watt or 1)
    fleet = 1 - (arm.watts or 0) / (x86.watts or 1)
    return (
        "Contradicts itself: its opening saves 35% of the power and a later answer 35 to 45%, but its tables give "
        f"1 − (150/165)/(270/120) = {a_sample:.1%} for a sample and 1 − 9.15/22.68 = {fleet:.1%} for all machines. "
        "For the machines of the opening it states no watts."
    )


def _its_ratings(page: PublishedComparison, prices: PriceTable) -> str:
    small, large = (
        [page.of(name).machine.watts or 0 for name in names] for names in ((SMALL_X86, SMALL_ARM), (X86, ARM))
    )
    listed = machines_as_listed(prices)
    said = (
        f"Contradicts itself: {X86} has {large[0]:g} W and {ARM} {large[1]:g} W, but four of the 4xlarge, the same cores, "
        f"4·{small[0]:g} = {4 * small[0]:g} W and 4·{small[1]:g} = {4 * small[1]:g} W; "
        "and an answer gives such a Xeon 205 to 270 W."
    )
    if listed is None:
        return said
    watts = {machine.name: machine.watts for machine in listed}
    rates = page.of(ARM).machine.rate / page.of(X86).machine.rate
    x86, arm = watts[X86], watts[ARM]
    if x86 is None or arm is None:
        return said
    return (
        f"{said} The price table has TDPs of {x86:g} W and {arm:g} W, with their source: a sample then takes "
        f"1 − ({arm:g}/165)/({x86:g}/120) = {1 - arm / x86 / rates:.1%} less."
    )


def _its_sizes() -> str:
    return "Contradicts itself: it says that c7g offers 8, 16, 32 and 48 vCPUs, and computes with c7g.16xlarge, of 64."


def _its_price(page: PublishedComparison, prices: PriceTable) -> str | None:
    family, machines = _family(prices, ARM), machines_as_listed(prices)
    if family is None or machines is None:
        return None
    listed = published_comparison(machines=machines)
    (was,), (now,) = ([each for each in one.differences if each.second.machine.name == ARM] for one in (page, listed))
    arm, small = now.second, listed.of(SMALL_ARM).machine.dollars_an_hour or 0
    return (
        f"Wrong: {ARM} does not cost {was.second.machine.dollars_an_hour} dollars on demand, but {arm.machine.dollars_an_hour:g} "
        f"in {family.region} (as of {family.as_of}), four times the {small:g} that the page has for {SMALL_ARM}. At list "
        f"prices it is ${arm.annual_dollars or 0:,.0f} against ${now.first.annual_dollars or 0:,.0f}: "
        f"{now.dollars_share or 0:.1%} less, not {was.dollars_share or 0:.1%}, and ${now.dollars or 0:,.0f} a year."
    )


def _its_opening(prices: PriceTable) -> str | None:
    x86, arm = (_price(prices, instance) for instance in OPENING_INSTANCES)
    if not x86 or not arm:
        return None
    return (
        f"Wrong: its opening says that {OPENING_INSTANCES[1]} serves 20% more than {OPENING_INSTANCES[0]} "
        f"at 40% less cost. At {arm:g} and {x86:g} dollars an hour the same work costs "
        f"1 − {arm:g}/{x86:g}/1.2 = {1 - arm / x86 / 1.2:.1%} less, and each machine {1 - arm / x86:.1%} less."
    )


def _its_gap(prices: PriceTable) -> str | None:
    arm = _price(prices, ARM)
    others = {name: price for name in ("c6i", "c7i", "c7a") if (price := _price(prices, f"{name}.16xlarge"))}
    if not arm or not others:
        return None
    gaps = ", ".join(f"{1 - arm / price:.0%} less than {name}" for name, price in others.items())
    return f"Wrong: it says that Graviton3 costs 20 to 40% less than an equal x86. With 64 vCPUs, c7g costs {gaps}."


def _its_mac(page: PublishedComparison, prices: PriceTable) -> str | None:
    found = prices.find(MAC_STUDIO)
    if found is None or found[1].purchase_price is None:
        return None
    family, size = found
    stated, watts = page.of(MAC_STUDIO).machine, family.watts(size)
    said = f"Wrong: a Mac Studio with an M2 Ultra was ${size.purchase_price:,.0f}, not ${MAC_STUDIO_DOLLARS:,}."
    if watts is None:
        return said
    return (
        f"{said} Its {stated.watts:g} W are not the {watts:g} W at most that the maker states for the whole machine: "
        f"95/{watts:g} = {stated.rate / watts:.2f} samples a second and watt, not {stated.rate_per_watt or 0:.2f}."
    )


def _its_cores(page: PublishedComparison) -> str:
    x86, arm = page.of(X86).machine, page.of(ARM).machine
    return (
        f"Omitted: 64 vCPUs are {X86_CORES} cores of {x86.name} and {ARM_CORES} of {arm.name}. A core of the first does "
        f"120/{X86_CORES} = {x86.rate / X86_CORES:.2f} samples/s, one of the second 165/{ARM_CORES} = {arm.rate / ARM_CORES:.2f}: "
        "the saving comes from the price per core."
    )


def _family(prices: PriceTable, instance: str) -> InstanceFamily | None:
    found = prices.find(instance)
    return None if found is None else found[0]


def _price(prices: PriceTable, instance: str) -> float | None:
    found = prices.find(instance)
    return None if found is None else found[1].dollars_an_hour
