"""Write docs/settings.md from app/settings.py: `python -m tools.settings_table`; `--check` only compares it."""

from __future__ import annotations

import sys
from pathlib import Path

from app.settings import setting_rows

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

This page is for people who configure the server. `make docs` writes it. Each setting is a flag of `armature serve`
and an environment variable; the flag takes precedence. `armature probe` shows the value of each `auto` setting on your
machine, with its reason.

| flag | variable | values | default | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the whole page."""
    rows = (
        f"| `{row.flag}` | `{row.variable}` | {row.values.replace('|', ' or ')} | {row.default or '–'} | {row.description} |\n"
        for row in setting_rows()
    )
    return HEAD + "".join(rows)


def main(arguments: list[str]) -> int:
    """Write the page. With `--check`, return 1 if it is out of date."""
    if arguments == ["--check"]:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page()
        if not current:
            print("docs/settings.md is out of date: make docs", file=sys.stderr)
        return 0 if current else 1
    TARGET.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
