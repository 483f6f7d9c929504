"""The published comparison follows from its inputs to the dollar, and what is wrong with it is said in figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.bench.tco.prices import read_prices
from app.bench.tco.published import costs_at_list_prices, published_costs, published_remarks, saving_ratio
from app.bench.tco.sizing import annual_dollars, dollars_per_million, machines_needed


def test_its_machines_and_dollars() -> None:
    x86, arm = published_costs()
    assert (x86.machines, arm.machines) == (84, 61)
    assert round(x86.annual_dollars) == 2_001_485, "84 · 2.72 · 8,760"
    assert round(arm.annual_dollars) == 1_116_812, "61 · 2.09 · 8,760"
    assert saving_ratio([x86, arm]) == pytest.approx(0.442, abs=5e-4)
    assert x86.dollars_per_million == pytest.approx(2_001_484.8 / (10_000 * 8760 * 3600) * 1e6)


def test_its_price_is_held_against_the_list() -> None:
    listed = costs_at_list_prices(read_prices(None))
    assert listed is not None
    assert [line.machines for line in listed] == [84, 61], "the rates are the article's"
    assert round(listed[1].annual_dollars) == round(61 * 2.32 * 8760)
    said = " ".join(published_remarks(read_prices(None)))
    for figure in (
        "83.3 is 84",
        "60.6 is 61",
        "$1,116,812",
        "does not cost 2.09 dollars on demand, but 2.32",
        "$1,239,715",
        "38.1% less, not 44.2%",
        "36.8%",
        "120 and 87",
    ):
        assert figure in said


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
    assert costs_at_list_prices(prices) is None
    assert not any(text.startswith("Wrong: ") for text in published_remarks(prices))


@pytest.mark.parametrize(
    ("per_second", "rate", "machines"), [(10_000, 120, 84), (330, 165, 2), (2.1, 0.3, 7), (1, 100, 1), (1.0001, 1, 2)]
)
def test_machines_are_whole(per_second: float, rate: float, machines: int) -> None:
    assert machines_needed(per_second, rate) == machines


def test_a_million_costs_what_a_year_costs_over_what_it_serves() -> None:
    annual = annual_dollars(1, 3.6)
    assert annual == pytest.approx(3.6 * 8760)
    assert dollars_per_million(annual, 1000) == pytest.approx(1.0), "3.6 dollars an hour, 3.6 million an hour"
