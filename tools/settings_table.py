"""Write the tables of docs/settings.md from app/settings.py: `python -m tools.settings_table`; `--check` only compares it."""

from __future__ import annotations

import sys
from pathlib import Path

from app.cli.parser import setting_rows
from app.settings import SETTING_GROUPS, Group
from tools.generated_page import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
TABLE = """## {heading}

| flag | variable | values | default | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    return "\n".join(map(_table, SETTING_GROUPS))


def _table(group: Group) -> str:
    return TABLE.format(heading=group.capitalize()) + "".join(
        f"| `{row.flag}` | `{row.variable}` | {row.values.replace('|', ' or ')} | {row.default or '–'} | {row.description} |\n"
        for row in setting_rows([group])
    )


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, TARGET, page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
