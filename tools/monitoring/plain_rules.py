"""Print the alert and recording rules as a plain file.

`python3 tools/monitoring/plain_rules.py [--runbooks URL] > armature.rules.yml`, with the address of your copy of
docs/alerts.md.
For a Prometheus without the operator. The text below `spec:` of each PrometheusRule is such a file when it is
unindented. So only the standard library is needed, and comments are kept.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

MONITORING = Path(__file__).resolve().parents[2] / "k8s" / "components" / "monitoring"
RUNBOOKS = "https://armature.example/docs/alerts.md"  # in the manifests; nothing is there


def plain_rules(runbooks: str = RUNBOOKS) -> str:
    """Return all groups in one file, each with the first comment of its source."""
    groups = "".join(_groups(path.read_text()) for path in sorted(MONITORING.glob("rules-*.yaml")))
    return "groups:\n" + groups.replace(f"{RUNBOOKS}#", f"{runbooks}#")


def _groups(manifest: str) -> str:
    head, _, groups = manifest.partition("\nspec:\n  groups:\n")
    told = "".join(f"{line}\n" for line in head.splitlines() if line.startswith("#"))
    return textwrap.indent(told + textwrap.dedent(groups), "  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the alert and recording rules as a plain file.")
    parser.add_argument("--runbooks", metavar="URL", default=RUNBOOKS, help="address of your copy of docs/alerts.md")
    sys.stdout.write(plain_rules(parser.parse_args().runbooks))
