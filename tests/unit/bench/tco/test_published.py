"""The published comparison follows from its inputs to the dollar, and what is wrong with it is said with the sum."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from armature_bench.tco.capacity import ServingTarget
from armature_bench.tco.prices import read_prices
from armature_bench.tco.published import PublishedComparison, machines_as_listed, published_comparison
from armature_bench.tco.review import published_remarks
from armature_bench.tco.sizing import annual_dollars, dollars_per_million, machines_needed

# By hand from the page: machines, dollars a year, kW, samples a second and watt.
BY_HAND = {
    "c6i.4xlarge": (334, 334 * 0.68 * 8760, 23.38, 30 / 70),
    "c7g.4xlarge": (239, 239 * 0.58 * 8760, 9.082, 42 / 38),
    "c6i.16xlarge": (84, 84 * 2.72 * 8760, 22.68, 0.444),
    "c7g.16xlarge": (61, 61 * 2.09 * 8760, 9.15, 1.10),
    "mac-studio-m2-ultra": (106, None, 6.36, 1.583),
}


def listed() -> PublishedComparison:
    machines = machines_as_listed(read_prices(None))
    assert machines is not None
    return published_comparison(machines=machines)


@pytest.mark.parametrize("name", BY_HAND)
def test_its_machines_dollars_and_watts(name: str) -> None:
    machines, dollars, kilowatts, rate_per_watt = BY_HAND[name]
    found = published_comparison().of(name)
    assert found.machines == machines
    assert found.annual_dollars == (None if dollars is None else pytest.approx(dollars))
    assert found.watts == pytest.approx(kilowatts * 1000)
    assert found.machine.rate_per_watt == pytest.approx(rate_per_watt, abs=5e-4)


def test_arm_against_x86_of_each_size() -> None:
    small, large = published_comparison().differences
    assert (small.second.machine.name, large.second.machine.name) == ("c7g.4xlarge", "c7g.16xlarge")
    assert large.dollars == pytest.approx((84 * 2.72 - 61 * 2.09) * 8760), "the page's $900,000"
    assert large.dollars_share == pytest.approx(0.442, abs=5e-4)
    assert (small.p99_share, large.p99_share) == (pytest.approx(1 - 26 / 35), pytest.approx(1 - 23 / 31))
    assert large.watts_share == pytest.approx(1 - 9.15 / 22.68)


def test_target_and_hours_are_parameters() -> None:
    found = published_comparison(ServingTarget(240), 2000).of("c6i.16xlarge")
    assert (found.machines, found.annual_dollars) == (2, pytest.approx(2 * 2.72 * 2000))
    assert found.dollars_per_million == pytest.approx(2 * 2.72 / (240 * 3600) * 1e6), "of the hours that are paid"


def test_a_bought_machine_costs_the_same_however_long_it_runs() -> None:
    prices = read_prices(None)
    for hours in (8760, 100):
        machines = machines_as_listed(prices, hours)
        assert machines is not None
        mac = published_comparison(ServingTarget(95), hours, machines).of("mac-studio-m2-ultra")
        assert mac.annual_dollars == pytest.approx(3999 / 3)


def test_the_price_table_replaces_prices_and_watts() -> None:
    arm = listed().of("c7g.16xlarge")
    assert (arm.machines, arm.annual_dollars) == (61, pytest.approx(61 * 2.32 * 8760)), "the rates are the page's"
    assert arm.machine.watts == 220
    assert listed().of("c6i.4xlarge").machine.watts == pytest.approx(300 / 4)


@pytest.mark.parametrize(
    "figure",
    [
        "83.3 is 84",
        "60.6 is 61",
        "$884,672 apart",
        "0.44, 1.10, 1.58 samples",
        "22.7 and 9.2 kW",
        "1 − 2.09/2.72 = 23.2%",
        "165/120 − 1 = 37.5%",
        "= 44.1%, in whole machines 44.2%",
        "1 − 0.62/1.38 = 55.1%",
        "1 − (150/165)/(270/120) = 59.6%",
        "1 − 9.15/22.68 = 59.7%",
        "4·70 = 280 W and 4·38 = 152 W",
        "300 W and 220 W",
        "1 − (220/165)/(300/120) = 46.7%",
        "does not cost 2.09 dollars on demand, but 2.32",
        "$1,239,715",
        "38.1% less, not 44.2%",
        "1 − 1.16/1.53/1.2 = 36.8%",
        "15% less than c6i",
        "$3,999, not $2,000",
        "95/295 = 0.32",
        "120 and 87",
        "120/32 = 3.75",
    ],
)
def test_each_point_of_the_review_has_its_sum(figure: str) -> None:
    assert figure in " ".join(published_remarks(read_prices(None)))


def test_the_sums_of_the_review_are_right() -> None:
    """Every `a op b = c` of the review is computed again from its text."""
    sums = re.findall(
        r"((?:[\d.,]+|\()[\d.,()/·− ]*\d\)?) = ([\d.,]+)(%?)", " ".join(published_remarks(read_prices(None)))
    )
    assert len(sums) > 12
    for text, result, percent in sums:
        value = eval(text.replace(",", "").replace("·", "*").replace("−", "-"))
        assert value * (100 if percent else 1) == pytest.approx(float(result.rstrip(".,")), abs=0.06), text


def test_without_its_machines_in_the_table_its_prices_are_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    shipped = """[[family]]
name = "c7g"
cloud = "x"
processor = "x"
architecture = "arm64"
region = "x"
threads_per_core = 1
sizes = [{ name = "x", vcpus = 1 }]
"""
    path.write_text(shipped, encoding="utf-8")
    prices = read_prices(path)
    assert machines_as_listed(prices) is None
    said = published_remarks(prices)
    assert not any("c7g" in text for text in said if text.startswith("Wrong: "))
    assert any(text.startswith("Contradicts itself: ") for text in said), "the page's own words need no table"


@pytest.mark.parametrize(
    ("per_second", "rate", "machines"), [(10_000, 120, 84), (330, 165, 2), (2.1, 0.3, 7), (1, 100, 1), (1.0001, 1, 2)]
)
def test_machines_are_whole(per_second: float, rate: float, machines: int) -> None:
    assert machines_needed(per_second, rate) == machines


def test_a_million_costs_what_a_year_costs_over_what_it_serves() -> None:
    annual = annual_dollars(1, 3.6)
    assert annual == pytest.approx(3.6 * 8760)
    assert dollars_per_million(annual, 1000) == pytest.approx(1.0), "3.6 dollars an hour, 3.6 million an hour"
