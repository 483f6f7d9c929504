"""Print the alert and recording rules as a plain file: `python3 tools/monitoring/plain_rules.py > armature.rules.yml`.

What stands below `spec:` in each PrometheusRule, moved to the left, is such a file; so nothing but Python is needed, and comments stay.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

MONITORING = Path(__file__).resolve().parents[2] / "k8s" / "components" / "monitoring"


def plain_rules() -> str:
    """All groups in one file, each source's first comment above its own."""
    return "groups:\n" + "".join(_groups(path.read_text()) for path in sorted(MONITORING.glob("rules-*.yaml")))


def _groups(manifest: str) -> str:
    head, _, groups = manifest.partition("\nspec:\n  groups:\n")
    told = "".join(f"{line}\n" for line in head.splitlines() if line.startswith("#"))
    return textwrap.indent(told + textwrap.dedent(groups), "  ")


if __name__ == "__main__":
    sys.stdout.write(plain_rules())
