"""The price table that is shipped holds what was promised of it, and a user's own is read as strictly."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from armature_bench.console import MeasurementFailed
from armature_bench.tco.prices import PriceTable, read_prices

OURS = """
[[family]]
name = "c7g"
cloud = "AWS"
processor = "Graviton3"
architecture = "arm64"
region = "here"
threads_per_core = 1
source = "our contract"
read = 2026-11-01
sizes = [{ name = "c7g.16xlarge", vcpus = 64, hourly_price = 1.5 }]
"""


def own(tmp_path: Path, text: str) -> PriceTable:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return read_prices(path)


def test_every_shipped_price_says_where_and_when_it_was_read() -> None:
    for family, size in read_prices(None).sizes():
        assert size.dollars_an_hour is not None, f"{size.name}: no price, no row"
        assert family.source.startswith("https://"), family.name
        assert family.read is not None
        assert date(2026, 1, 1) < family.read <= date.today()
        assert family.as_of is None or family.as_of <= family.read
        assert family.power is None or family.power.source.startswith("https://"), family.name


@pytest.mark.parametrize(
    "name",
    [
        "c6i.16xlarge", "c7i.16xlarge", "c7a.16xlarge", "c7g.16xlarge", "c8g.16xlarge", "VM.Standard.A1.Flex-16",
        "VM.Standard.A2.Flex-16", "c4a-standard-16", "Standard_D16ps_v6", "mac-studio-m2-ultra", "g6.xlarge", "g5.xlarge",
    ],
)  # fmt: skip
def test_the_machines_that_were_asked_for_are_there(name: str) -> None:
    assert read_prices(None).find(name) is not None


def test_rent_grows_with_the_cores_within_a_family() -> None:
    """A digit in the wrong place would show; providers round, and cards are sold with more or less processor beside them."""
    for family in read_prices(None).families.values():
        each = [
            size.dollars_an_hour / family.cores(size) for size in family.sizes if size.dollars_an_hour and not size.gpus
        ]
        assert all(price == pytest.approx(each[0], rel=0.03) for price in each), family.name


def test_cores_are_physical_ones() -> None:
    prices = read_prices(None)
    cores = {name: family.cores(size) for family, size in prices.sizes() for name in [size.name]}
    assert (cores["c6i.16xlarge"], cores["c7i.16xlarge"]) == (32, 32), "an x86 vCPU is a thread"
    assert (cores["c7a.16xlarge"], cores["c7g.16xlarge"], cores["Standard_D16ps_v6"]) == (64, 64, 16), "but not here"


def test_watts_are_a_share_of_the_processor() -> None:
    prices = read_prices(None)
    watts = {size.name: family.watts(size) for family, size in prices.sizes()}
    assert watts["c6i.16xlarge"] == 300
    assert watts["c6i.4xlarge"] == 75
    assert watts["g6.12xlarge"] == 4 * 72
    assert watts["c8g.16xlarge"] is None, "nobody says"


def test_what_was_bought_costs_its_price_over_its_hours() -> None:
    found = read_prices(None).find("mac-studio-m2-ultra")
    assert found is not None
    assert found[1].dollars_an_hour == pytest.approx(3999 / 3 / 8760)


def test_a_family_of_the_users_own_replaces_ours_and_leaves_the_others(tmp_path: Path) -> None:
    prices = own(tmp_path, OURS)
    found = prices.find("c7g.16xlarge")
    assert found is not None
    assert found[1].hourly_price == 1.5
    assert prices.find("c7g.large") is None
    assert prices.find("c6i.large") is not None


def test_a_machine_of_the_users_own_may_have_no_price(tmp_path: Path) -> None:
    text = OURS.replace(", hourly_price = 1.5", "").replace('source = "our contract"\nread = 2026-11-01\n', "")
    found = own(tmp_path, text).find("c7g.16xlarge")
    assert found is not None
    assert found[1].dollars_an_hour is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('source = "our contract"\n', "", "need `source` and `read`"),
        ("read = 2026-11-01\n", "", "need `source` and `read`"),
        ("hourly_price = 1.5", "hourly_price = 0", "greater than 0"),
        ("hourly_price = 1.5", 'hourly_price = "1.5"', "valid number"),
        ("hourly_price = 1.5", "hourly_price = nan", "finite"),
        ("hourly_price = 1.5", "hourly_price = 1.5, purchase_price = 5, years = 3", "either"),
        ("hourly_price = 1.5", "purchase_price = 5", "must be given together"),
        ("vcpus = 64, ", "", "Field required"),
        ('"arm64"', '"riscv"', "arm64"),
        ('cloud = "AWS"', "", "family.0.cloud: Field required"),
        ('cloud = "AWS"', 'cloud = "AWS"\nflavour = "x"', "flavour"),
        ("sizes = [{", 'sizes = [{ name = "c7g.16xlarge", vcpus = 1 }, {', "twice"),
        ("[[family]]", "[[family", "not valid TOML"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_the_place(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in OURS
    with pytest.raises(MeasurementFailed, match=r"my\.toml") as refused:
        own(tmp_path, OURS.replace(old, new))
    assert complaint in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"none\.toml cannot be read"):
        read_prices(tmp_path / "none.toml")
