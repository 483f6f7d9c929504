"""docs/edge.md: what it says of small machines is their plan, and packs have the layouts of the C sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.errors import PlanImpossible
from app.hardware.plan.weights import check_torch_can_run
from tools import auto_table
from tools.recorded_hosts import HOSTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "edge.md").read_text(encoding="utf-8")
SMALL = ("radxa-x4", "orion-o6", "rock-5b", "raspberry-pi-5")
LEVELS = ROOT / "armature_kernels" / "csrc" / "levels"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = [line for line in PAGE.split(f"## {heading}")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("host", SMALL)
def test_what_is_chosen_is_in_the_generated_page(host: str) -> None:
    chosen = []
    for model in auto_table.MODELS:
        part = auto_table.TARGET.read_text(encoding="utf-8").split(f"## A model of {model} parameters")[1]
        row = next(line for line in part.splitlines() if line.startswith(f"| {auto_table.SHOWN[host]} |"))
        precision, rate = (cell.strip() for cell in row.split("|")[2:4])
        chosen.append(f"{precision}, {rate}" if rate else precision)
    (found,) = [
        cells for cells in rows("What is chosen") if cells[0].startswith(auto_table.SHOWN[host].partition(" (")[0])
    ]
    facts = auto_table.facts_of(host)
    assert found[0].endswith(f"{facts.memory_bytes // 2**30} GiB")
    assert (found[1].strip("`"), found[2:]) == (_level(host), chosen)


def _level(host: str) -> str:
    line = next(line for line in auto_table.TARGET.read_text(encoding="utf-8").splitlines() if f"`{host}`" in line)
    return line.split("|")[4].strip()


def test_every_small_machine_is_recorded() -> None:
    assert len(rows("What is chosen")) == len(SMALL) + 1, "and the Raspberry Pi 4"
    assert all((HOSTS / host / "SOURCE.md").is_file() for host in SMALL)


def test_the_refusal_is_quoted() -> None:
    with pytest.raises(PlanImpossible) as refusal:
        check_torch_can_run(auto_table.facts_of("raspberry-pi-4"))
    quoted = " ".join(line.removeprefix("> ") for line in PAGE.splitlines() if line.startswith("> "))
    assert quoted == refusal.value.message


def test_the_layouts_of_packs_are_those_of_the_sources() -> None:
    blocks = {file.stem: re.search(r"#define BLOCK (\d+)", file.read_text())[1] for file in LEVELS.glob("*.c")}  # type: ignore[index]
    said = {level: cells[2] for cells in rows("Carry packed weights") for level in re.findall(r"`(\w+)`", cells[0])}
    assert said == blocks
