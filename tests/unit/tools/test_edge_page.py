"""docs/edge.md: it quotes the refusal of old boards, and packs have the layouts of the C sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.errors import PlanImpossible
from app.hardware.plan.weights import check_torch_can_run
from tools import auto_table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "edge.md").read_text(encoding="utf-8")
LEVELS = ROOT / "armature_kernels" / "csrc" / "levels"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = [line for line in PAGE.split(f"## {heading}")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_refusal_is_quoted() -> None:
    with pytest.raises(PlanImpossible) as refusal:
        check_torch_can_run(auto_table.facts_of("raspberry-pi-4"))
    quoted = " ".join(line.removeprefix("> ") for line in PAGE.splitlines() if line.startswith("> "))
    assert quoted == refusal.value.message


def test_the_layouts_of_packs_are_those_of_the_sources() -> None:
    blocks = {file.stem: re.search(r"#define BLOCK (\d+)", file.read_text())[1] for file in LEVELS.glob("*.c")}  # type: ignore[index]
    said = {level: cells[2] for cells in rows("Carry packed weights") for level in re.findall(r"`(\w+)`", cells[0])}
    assert said == blocks
