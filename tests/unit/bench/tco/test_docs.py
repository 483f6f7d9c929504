"""What docs/arm-or-x86.md says of prices is what the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from armature_bench.tco.prices import PriceTable, read_prices


def text(root: Path) -> str:
    return (root / "docs" / "arm-or-x86.md").read_text(encoding="utf-8")


def rent(prices: PriceTable, family: str) -> tuple[float, float]:
    """Dollars an hour of a vCPU and of a core, of the size with 16 vCPUs."""
    found = prices.families[family]
    size = next(each for each in found.sizes if each.vcpus == 16)
    assert size.dollars_an_hour is not None
    return size.dollars_an_hour / size.vcpus, size.dollars_an_hour / found.cores(size)


def test_by_how_much_x86_must_be_quicker(root: Path) -> None:
    prices = read_prices(None)
    rows = re.findall(r"^\| (\S+) \| (\S+) \| ([\d.]+) \| ([\d.]+) \|$", text(root), re.MULTILINE)
    assert len(rows) == 7
    for x86, arm, vcpu, core in rows:
        one, other = rent(prices, x86), rent(prices, arm)
        assert float(vcpu) == pytest.approx(one[0] / other[0], abs=0.006), (x86, arm)
        assert float(core) == pytest.approx(one[1] / other[1], abs=0.011), (x86, arm)


def test_the_example_of_a_table_is_one(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(re.findall(r"^```toml\n(.*?)^```", text(root), re.MULTILINE | re.DOTALL)[0], encoding="utf-8")
    found = read_prices(path).find("c7g.4xlarge")
    assert found is not None
    assert found[1].hourly_price == 0.5
