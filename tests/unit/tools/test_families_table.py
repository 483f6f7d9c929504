"""docs/families.md is what the table of families says, and the check notices where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.models.decoders.families import DECODER_FAMILIES, UNSUPPORTED
from tools import families_table


def test_the_page_is_current() -> None:
    assert families_table.main(["--check"]) == 0, "make docs"


def test_every_family_and_every_reason_has_a_line() -> None:
    page = families_table.page()
    assert all(f"| `{name}` | {family.title} |" in page for name, family in DECODER_FAMILIES.items())
    assert all(f"| {need} | " in page for need in UNSUPPORTED)


def test_a_page_that_is_out_of_date_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_table, "TARGET", tmp_path / "families.md")
    (tmp_path / "families.md").write_text("old")
    assert families_table.main(["--check"]) == 1
    assert families_table.main([]) == 0
    assert families_table.main(["--check"]) == 0
