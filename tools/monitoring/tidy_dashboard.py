"""Format dashboards that Grafana exported: `python -m tools.monitoring.tidy_dashboard FILE...`.

It removes what belongs to one Grafana (ids, versions, the chosen data source), orders the keys, and writes on one line
what fits. A changed query is then one changed line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH = 140
INDENT = 2
# These keys come first; the others follow in alphabetical order.
FIRST = ("id", "uid", "name", "type", "title", "description", "gridPos", "label", "refId", "legendFormat", "expr")
LAST = ("panels",)
# Fields that differ in every Grafana.
FOREIGN = ("__inputs", "__requires", "__elements", "iteration", "gnetId", "version", "pluginVersion", "revision")


def tidy(dashboard: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in dashboard.items() if key != "id"}
    for variable in kept.get("templating", {}).get("list", ()):
        if not variable.get("includeAll"):
            variable.pop("current", None)  # the value that a person had selected
        variable.pop("options", None)
    ordered: dict[str, Any] = _ordered(kept)
    return ordered


def written(value: Any, indent: int = 0) -> str:
    """Return JSON with each object and list on one line where it fits."""
    flat = json.dumps(value, ensure_ascii=False)
    if (indent and indent + len(flat) <= WIDTH) or not isinstance(value, dict | list) or not value:
        return flat
    inner, outer = "\n" + " " * (indent + INDENT), "\n" + " " * indent
    if isinstance(value, list):
        return "[" + ",".join(inner + written(each, indent + INDENT) for each in value) + outer + "]"
    pairs = (f"{inner}{json.dumps(key)}: {written(each, indent + INDENT)}" for key, each in value.items())
    return "{" + ",".join(pairs) + outer + "}"


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _ordered(value[key]) for key in sorted(value.keys() - set(FOREIGN), key=_place)}


def _place(key: str) -> tuple[int, str]:
    if key in LAST:
        return len(FIRST) + 1, key
    return (FIRST.index(key), key) if key in FIRST else (len(FIRST), key)


def main() -> int:
    for file in map(Path, sys.argv[1:]):
        file.write_text(written(tidy(json.loads(file.read_text()))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
