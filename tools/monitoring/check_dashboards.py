"""Check that every dashboard panel has data.

`python -m tools.monitoring.check_dashboards --url http://HOST:9090 [FILE...]`.
Each panel's query is sent to that Prometheus as Grafana sends it: variables filled in by their own queries, with
everything selected. An empty panel is a fault, unless it is about something that this installation does not have.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

DASHBOARDS = Path(__file__).resolve().parents[2] / "k8s" / "components" / "monitoring" / "dashboards"
# Series that may be absent, and why. If none of a query's series exists, the query may be empty.
MAY_BE_ABSENT = {
    "process_cgroup_cpu_throttled_seconds_total": "no CPU quota",
    "armature_cpu_quota_cores": "no CPU quota",
    "armature_energy_idle_watts": "no counter of energy: what is modelled knows no idle power",
    "armature_energy_above_idle_joules_per_token": "no counter of energy: what is modelled knows no idle power",
    "armature_energy_above_idle_joules_per_vector": "no counter of energy: what is modelled knows no idle power",
    "armature_power_watts": "no counter of energy, and no --watts",
    "armature_energy_joules_total": "no counter of energy, and no --watts",
    "armature_cost_dollars_total": "no --hourly-price",
    "armature_capacity_tokens_per_second": "not measured: a machine that was too busy, or calibrate=off",
    "armature_roofline_ratio": "not measured: a machine that was too busy, or calibrate=off",
    "armature_predicted_wait_seconds": "not measured, and no step yet",
}
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Query:
    """One target of a panel. `instant` queries are for now, the others over a range."""

    dashboard: str
    panel: str
    ref: str
    expr: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel} ({self.ref})"


@dataclass(frozen=True, slots=True)
class Window:
    """The displayed time in seconds since 1970. `rate_seconds` is `$__rate_interval`: at least four scrapes."""

    start: float
    end: float
    rate_seconds: int = 60

    def variables(self) -> dict[str, str]:
        spans = {
            "__range": round(self.end - self.start),
            "__rate_interval": self.rate_seconds,
            "__interval": self.rate_seconds,
        }
        return {name: f"{seconds}s" for name, seconds in spans.items()}


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The Prometheus queries that Grafana sends. `client` has the base URL."""

    client: httpx.Client

    def ask(self, path: str, **parameters: str | float) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=parameters).json()
        if answer["status"] != "success":
            raise SystemExit(f"{answer['error']}: {parameters}")
        return answer["data"]

    def answers(self, query: Query, expr: str, window: Window) -> list[dict[str, Any]]:
        """Return the series of a query that have at least one number."""
        if query.instant:
            found = self.ask("query", query=expr, time=window.end)["result"]
            return [each for each in found if is_number(each["value"][1])]
        step = max(1.0, (window.end - window.start) / 100)
        found = self.ask("query_range", query=expr, start=window.start, end=window.end, step=step)["result"]
        return [each for each in found if any(is_number(value) for _, value in each["values"])]


def is_number(text: str) -> bool:
    return math.isfinite(float(text))


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show data, inside or outside of rows."""
    for panel in dashboard["panels"]:
        yield from [panel] if panel["type"] != "row" else panel["panels"]


def queries(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            names = dashboard["title"], panel["title"], target["refId"]
            yield Query(*names, target["expr"], target.get("legendFormat", ""), bool(target.get("instant")))


def variables(prometheus: Prometheus, dashboard: Mapping[str, Any], window: Window) -> dict[str, str]:
    """Return the value of each variable with everything selected. A variable without values is a fault."""
    filled = window.variables()
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert asked is not None, f"{variable['name']}: not of the form label_values(SERIES, LABEL)"
        match = {"match[]": substituted(asked[1], filled)}
        values = prometheus.ask(f"label/{asked[2]}/values", **match, start=window.start, end=window.end)
        everything = variable.get("allValue") or "|".join(map(re.escape, values))
        filled[variable["name"]] = everything
    return filled


def substituted(text: str, filled: Mapping[str, str]) -> str:
    """Return the query with its variables replaced. Raises `KeyError` for an unknown variable."""
    return VARIABLE.sub(lambda found: filled[found[1] or found[2]].replace("\\", "\\\\"), text)


def excuse(prometheus: Prometheus, expr: str, window: Window) -> str | None:
    named = [name for name in MAY_BE_ABSENT if re.search(rf"\b{name}\b", expr)]
    times = {"start": window.start, "end": window.end}
    return next(
        (MAY_BE_ABSENT[name] for name in named if not prometheus.ask("series", **{"match[]": name}, **times)), None
    )


def check(prometheus: Prometheus, dashboard: Mapping[str, Any], window: Window) -> tuple[list[str], list[str]]:
    """Return the faults, and the empty queries with a reason, as sentences."""
    faults, excused = [], []
    filled = variables(prometheus, dashboard, window)
    faults += [f"{dashboard['title']}: ${name} has no values" for name, value in filled.items() if not value]
    for query in queries(dashboard):
        expr = substituted(query.expr, filled)
        found = prometheus.answers(query, expr, window)
        if not found:
            reason = excuse(prometheus, expr, window)
            (faults if reason is None else excused).append(f"{query} is empty: {reason or expr}")
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            if found and not any(label in each["metric"] for each in found) and label != "pool":
                faults.append(f"{query}: its legend wants the label {label}, which no series has")
    return faults, excused


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a panel is empty without a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="URL of the Prometheus that scrapes the servers")
    parser.add_argument("--minutes", type=float, default=15.0, help="minutes to look back")
    parser.add_argument(
        "--rate-seconds", type=int, default=60, help="seconds of $__rate_interval: at least four scrapes"
    )
    parser.add_argument("files", nargs="*", type=Path, help="dashboard files; default: this repository's")
    arguments = parser.parse_args(argv)
    now = time.time()
    window = Window(now - 60 * arguments.minutes, now, arguments.rate_seconds)
    found = []
    with httpx.Client(base_url=arguments.url, timeout=30) as client:
        for file in arguments.files or sorted(DASHBOARDS.glob("*.json")):
            found += report(Prometheus(client), json.loads(file.read_text()), window)
    return int(bool(found))


def report(prometheus: Prometheus, dashboard: Mapping[str, Any], window: Window) -> list[str]:
    faults, excused = check(prometheus, dashboard, window)
    total = len(list(queries(dashboard)))
    print(f"{dashboard['title']}: {total} queries, {len(faults)} faults, {len(excused)} empty with a reason")
    for line in faults + excused:
        print(f"  {line}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
