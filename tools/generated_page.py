"""Writes the part of a page of the docs that a tool generates, or checks that it is current."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(arguments: Sequence[str], target: Path, generated: str) -> int:
    """Replace the end of a page, from the first line of `generated` on; the text before it is written in the page.

    With `--check`, return 1 and say so if that would change the page.
    """
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    new = old.partition(generated[: generated.index("\n") + 1])[0] + generated
    if list(arguments) != ["--check"]:
        target.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"docs/{target.name} is out of date: make docs", file=sys.stderr)
        return 1
    return 0
