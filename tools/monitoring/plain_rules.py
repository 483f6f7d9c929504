"""Print the alert and recording rules as a plain file.

`python3 tools/monitoring/plain_rules.py > armature.rules.yml`.
For a Prometheus without the operator. The text below `spec:` of each PrometheusRule is such a file when it is
unindented. So only the standard library is needed, and comments are kept.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

MONITORING = Path(__file__).resolve().parents[2] / "k8s" / "components" / "monitoring"


def plain_rules() -> str:
    """Return all groups in one file, each with the first comment of its source."""
    return "groups:\n" + "".join(_groups(path.read_text()) for path in sorted(MONITORING.glob("rules-*.yaml")))


def _groups(manifest: str) -> str:
    head, _, groups = manifest.partition("\nspec:\n  groups:\n")
    told = "".join(f"{line}\n" for line in head.splitlines() if line.startswith("#"))
    return textwrap.indent(told + textwrap.dedent(groups), "  ")


if __name__ == "__main__":
    sys.stdout.write(plain_rules())
