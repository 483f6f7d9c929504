"""docs/chat-templates.md is what the trials find in real templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.text.template_form import TemplateForm
from app.text.tool_formats import TOOL_FORMATS
from real_formats import real_templates
from tools import templates_table


@pytest.mark.nightly
@pytest.mark.full
def test_the_page_is_current() -> None:
    if not real_templates():
        pytest.skip("no templates: `make real-formats`")
    assert templates_table.main(["--check"]) == 0, "python -m tools.templates_table"


def test_a_page_that_is_out_of_date_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "templates"
    monkeypatch.setattr(templates_table, "default_directory", lambda: tmp_path)
    monkeypatch.setattr(templates_table, "TARGET", tmp_path / "page.md")
    assert templates_table.main([]) == 2
    folder.mkdir()
    (folder / "one.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", encoding="utf-8"
    )
    assert templates_table.main([]) == 0 and templates_table.main(["--check"]) == 0
    assert (
        "| one | all | as text | yes | in the system message | joined | – | – | – |"
        in (tmp_path / "page.md").read_text()
    )
    (folder / "two.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert templates_table.main(["--check"]) == 1


def test_a_row_says_what_differs() -> None:
    form = TemplateForm(call_text="before", one_call=True, lists=frozenset({"user", "tool"}))
    row = templates_table.row("x", form, (TOOL_FORMATS["glm45"], None))
    assert row == "| x | all | yes, one each, text before | yes | yes | tool, user | – | `glm45` | – |\n"
