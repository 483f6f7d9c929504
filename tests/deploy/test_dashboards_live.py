"""Dashboards with two busy servers: every query of every panel, sent to a real Prometheus as Grafana sends it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.live_prometheus import LivePrometheus
from tools.monitoring.check_dashboards import (
    DASHBOARDS,
    Prometheus,
    Window,
    check,
    main,
    queries,
    substituted,
    variables,
)

pytestmark = pytest.mark.full  # Prometheus and servers are started

LOOK_BACK = 300.0  # the servers were busy for less
RATE_SECONDS = 15  # Grafana takes four scrape intervals at least; a busy machine misses some
NO_IDLE = "no counter of energy: what is modelled knows no idle power"

Dashboard = dict[str, Any]
FILES = sorted(DASHBOARDS.glob("*.json"))
every = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def asked(prometheus: LivePrometheus) -> Iterator[Prometheus]:
    with httpx.Client(base_url=prometheus.url, timeout=30) as client:
        yield Prometheus(client)


@pytest.fixture(scope="module")
def window(prometheus: LivePrometheus) -> Window:
    return Window(prometheus.at - LOOK_BACK, prometheus.at, RATE_SECONDS)


def loaded(name: str) -> Dashboard:
    found: Dashboard = json.loads((DASHBOARDS / f"{name}.json").read_text())
    return found


@every
def test_no_panel_is_empty(file: Path, prometheus: LivePrometheus, asked: Prometheus, window: Window) -> None:
    faults, excused = check(asked, loaded(file.stem), window)
    assert not faults, "\n".join(faults)
    reasons = {line.partition(" is empty: ")[2] for line in excused}
    assert reasons <= {NO_IDLE} | (set() if prometheus.has_quota else {"no CPU quota"}), excused


@every
def test_a_model_chooses_its_instances_and_a_pool_its_series(file: Path, asked: Prometheus, window: Window) -> None:
    dashboard = loaded(file.stem)
    of_bert = copy.deepcopy(dashboard)
    for variable in of_bert["templating"]["list"]:
        if variable["name"] == "model":
            variable["allValue"] = "bert"
    assert variables(asked, of_bert, window)["instance"] == r"armature\-arm64\-0"
    chosen = variables(asked, dashboard, window) | {"pool": "arm64", "job": "armature"}
    for query in queries(dashboard):
        found = asked.answers(query, substituted(query.expr, chosen), window)
        assert {series["metric"].get("pool", "arm64") for series in found} <= {"arm64"}, query


@every
def test_without_pools_there_is_one(file: Path, asked: Prometheus, window: Window) -> None:
    """A plain list of targets gives no label but job and instance: what a server that generates shows is there all the same."""
    dashboard = loaded(file.stem)
    chosen = variables(asked, dashboard, window) | {"job": "plain"}
    empty = [query for query in queries(dashboard) if not asked.answers(query, substituted(query.expr, chosen), window)]
    of_vectors = {"Dollars for a million vectors", "Joules for a vector"}
    of_idle = {"Power", "Idle and active power", "Joules for a token"}
    assert {query.panel for query in empty} <= of_vectors | of_idle | {"Pools"}, empty


@every
def test_annotations_can_be_asked_for(file: Path, asked: Prometheus, window: Window) -> None:
    """Nothing restarted and nothing may have fired: but the words are Prometheus' own."""
    dashboard = loaded(file.stem)
    filled = variables(asked, dashboard, window)
    for annotation in dashboard["annotations"]["list"]:
        asked.ask(
            "query_range", query=substituted(annotation["expr"], filled), start=window.start, end=window.end, step=60
        )


@pytest.mark.parametrize(
    ("expr", "legend", "told"),
    [
        ('armature_nothing{pool=~"$pool"}', "", ["is empty: armature_nothing"]),
        ('armature_threads{pool=~"$pool"}', "{{phase}}", ["wants the label phase"]),
        ("armature_energy_idle_watts", "", []),
        ("armature_threads", "{{instance}}", []),
    ],
)
def test_what_is_missing_is_reported(
    expr: str, legend: str, told: list[str], asked: Prometheus, window: Window
) -> None:
    dashboard = loaded("service")
    panel = next(each for each in dashboard["panels"] if each["type"] == "timeseries")
    panel["targets"] = [{"refId": "A", "legendFormat": legend, "expr": expr}]
    dashboard["panels"] = [panel]
    faults, _ = check(asked, dashboard, window)
    assert len(faults) == len(told), faults
    assert all(part in fault for part, fault in zip(told, faults, strict=True)), faults


def test_the_command_says_it_of_a_file(
    prometheus: LivePrometheus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboard = loaded("engine")
    dashboard["panels"] = dashboard["panels"][:3]
    dashboard["panels"][-1]["targets"][0]["expr"] = "armature_nothing"
    file = tmp_path / "planted.json"
    file.write_text(json.dumps(dashboard))
    assert main(["--url", prometheus.url, str(file)]) == 1
    assert "Armature: engine: 2 queries, 1 faults, 0 empty with a reason" in capsys.readouterr().out
