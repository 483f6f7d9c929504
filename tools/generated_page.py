"""Writes a page of the docs that a tool generates, or checks that it is current."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(arguments: Sequence[str], target: Path, page: str) -> int:
    """Write the page. With `--check`, return 1 and say so if the file is out of date."""
    if list(arguments) != ["--check"]:
        target.write_text(page, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == page:
        return 0
    print(f"docs/{target.name} is out of date: make docs", file=sys.stderr)
    return 1
