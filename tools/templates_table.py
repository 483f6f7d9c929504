"""Write the table of docs/chat-templates.md from the templates of `make real-formats`: `python -m tools.templates_table`.

`--check` only compares the page. Each row is what trial conversations find (`app/text/template_form.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from app.text.chat import ChatTemplate
from app.text.reasoning import ReasoningFormat, choose_reasoning_format
from app.text.template_form import TemplateForm
from app.text.tool_formats import ToolFormat
from tools.generated_page import write_or_check
from tools.real_formats import default_directory

TARGET = Path(__file__).resolve().parent.parent / "docs" / "chat-templates.md"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HEAD = """| template | system messages | calls | results | tools | parts | thinking | format of calls | of reasoning |
|---|---|---|---|---|---|---|---|---|
"""


def row(name: str, form: TemplateForm, formats: Sequence[ToolFormat | ReasoningFormat | None]) -> str:
    """Return the table's row of a template; `formats` are of calls and of reasoning."""
    rules = form.system
    places = "all" if rules.later else "first" if rules.first else "to the user"
    if not form.calls:
        calls = "as text"
    else:
        beside = {"content": "", "tool_plan": "text as `tool_plan`", "before": "text before"}[form.call_text]
        rest = ("one each" if form.one_call else "", "arguments as text" if form.text_arguments else "", beside)
        calls = ", ".join(("yes", *filter(None, rest)))
    results, tools = "yes" if form.results else "as text", "yes" if form.tools else "in the system message"
    thinking = ", ".join(f"`{one}`" for one in form.thinking.names) or "–"
    parts = ", ".join(sorted(form.lists)) if len(form.lists) < 4 else "all roles"
    named = [f"`{one.name}`" if one is not None else "–" for one in formats]
    cells = (name, places, calls, results, tools, parts or "joined", thinking, *named)
    return f"| {' | '.join(cells)} |\n"


def page(folder: Path) -> str:
    rows = []
    for path in sorted(folder.glob("*.jinja"), key=lambda one: one.stem.lower()):
        template = ChatTemplate(path.read_text(encoding="utf-8"), TOKENS)
        rows.append(row(path.stem, template.form, (template.tool_format, choose_reasoning_format(template.evidence))))
        template.close()
    return HEAD + "".join(rows)


def main(arguments: list[str]) -> int:
    """Return 1 with `--check` if the page is out of date; without the templates, return 2."""
    folder = default_directory() / "templates"
    if not folder.is_dir():
        print("there are no templates: make real-formats", file=sys.stderr)
        return 2
    return write_or_check(arguments, TARGET, page(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
