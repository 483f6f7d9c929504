"""docs/settings.md is what the settings say, and the check notices where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.parser import setting_rows
from app.settings import SETTING_GROUPS
from tools import settings_table


def test_the_page_is_current() -> None:
    assert settings_table.main(["--check"]) == 0, "make docs"


def test_every_setting_has_a_line() -> None:
    page = settings_table.page()
    for row in setting_rows():
        assert f"| `{row.flag}` | `{row.variable}` |" in page
    assert page.count("\n|") == len(setting_rows()) + 2 * len(SETTING_GROUPS)


def test_a_page_that_is_out_of_date_is_noticed_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings_table, "TARGET", tmp_path / "settings.md")
    assert settings_table.main(["--check"]) == 1
    (tmp_path / "settings.md").write_text("old")
    assert settings_table.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert settings_table.main([]) == 0
    assert settings_table.main(["--check"]) == 0
