"""Print the section of CHANGELOG.md for a tag: `python -m tools.release_notes v1.2.3`. Needs no packages.

The tag must be `v` and the version in app/version.py, and its section must have a date. Otherwise the command says
what is wrong.
"""

from __future__ import annotations

import re
import sys

from app.version import VERSION
from tools.install import ROOT


def main(arguments: list[str]) -> int:
    """Return 1 after printing a sentence if tag, version and changelog do not agree."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(notes(arguments[0], VERSION, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    except LookupError as missing:
        print(f"release: {missing}", file=sys.stderr)
        return 1
    return 0


def notes(tag: str, version: str, changelog: str) -> str:
    if tag != f"v{version}":
        raise LookupError(f"the tag is {tag}, and app/version.py says {version}: the tag should be v{version}")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changelog, re.MULTILINE)
    if heading is None:
        raise LookupError(f"CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`")
    section = re.split(r"^(?:## |\[[^]]+\]: )", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not section:
        raise LookupError(f"the section of {version} in CHANGELOG.md is empty")
    return section


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
