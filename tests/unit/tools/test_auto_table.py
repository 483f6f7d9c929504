"""docs/auto.md is the plan for recorded hosts: it is current, and on none of them `auto` is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import auto_table

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
def test_the_committed_page_is_current() -> None:
    assert auto_table.main(["--check"]) == 0, "make docs"


def test_the_levels_are_those_of_the_library() -> None:
    built = {file.stem for file in (ROOT / "armature_kernels" / "csrc" / "levels").glob("*.c")}
    assert {level for levels in auto_table.LEVELS.values() for level in levels} == built


@pytest.mark.full
def test_no_host_serves_a_large_model_in_fp32() -> None:
    rows = [line.strip("| ").split(" | ") for line in auto_table.page().splitlines() if line.startswith("| ")]
    head, *hosts = rows[0], *rows[2:]
    assert head[-4:] == list(auto_table.MODELS)
    assert [cells[0].removesuffix(" *") for cells in hosts] == list(auto_table.SHOWN.values())
    assert not [cells for cells in hosts if any("fp32" in cell for cell in cells[-3:])]


def test_it_writes_the_page_and_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_table, "TARGET", tmp_path / "auto.md")
    monkeypatch.setattr(auto_table, "page", lambda: "the page\n")
    assert auto_table.main(["--check"]) == 1
    (tmp_path / "auto.md").write_text("another page\n")
    assert auto_table.main(["--check"]) == 1
    assert auto_table.main([]) == 0
    assert auto_table.main(["--check"]) == 0
