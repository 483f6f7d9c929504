"""The dashboards' JSON: Grafana's own types accept it, it is written as a person can review it, and nothing in it is missing or twice."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.metrics.instruments import SECONDS_BUCKETS
from external_tools import ROOT, built, node_package, of_kind, run, tool
from tools.monitoring.check_dashboards import DASHBOARDS, panels, queries
from tools.monitoring.plain_rules import plain_rules
from tools.monitoring.tidy_dashboard import tidy, written

FILES = sorted(DASHBOARDS.glob("*.json"))
SHAPE = Path(__file__).parent / "grafana" / "shape.ts"
COLUMNS = 24
UNITS = {
    "short",
    "reqps",
    "percentunit",
    "s",
    "bytes",
    "watt",
    "joule",
    "currencyUSD",
}  # Grafana's names for what we show
SELECTED = ("namespace", "job", "pool", "instance")

Dashboard = dict[str, Any]
every = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def loaded(file: Path) -> Dashboard:
    found: Dashboard = json.loads(file.read_text())
    return found


def test_the_four_are_there() -> None:
    assert [file.stem for file in FILES] == ["cost", "engine", "fleet", "service"]
    assert len({loaded(file)["uid"] for file in FILES}) == len(FILES)


@every
def test_it_is_kept_tidy(file: Path) -> None:
    """`python -m tools.monitoring.tidy_dashboard` writes it so."""
    assert file.read_text() == written(tidy(loaded(file))) + "\n"


def test_they_are_of_grafanas_types(tmp_path: Path) -> None:
    """Every option of every panel, as its plugin publishes them; schemaVersion 42 is what these types are of."""
    node, compiler = tool("node"), node_package("typescript") / "bin" / "tsc"
    (tmp_path / "node_modules").symlink_to(node_package("@grafana/schema").parents[1])
    shutil.copy(SHAPE, tmp_path)
    for file in FILES:
        literal = f'import type {{ Dashboard }} from "./{SHAPE.stem}";\nexport const dashboard: Dashboard = {file.read_text()};\n'
        (tmp_path / f"{file.stem}.ts").write_text(literal)
    flags = "--noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext --target es2022".split()
    told = run([node, compiler, *flags, *(f"{file.stem}.ts" for file in FILES)], cwd=tmp_path)
    assert told.returncode == 0, told.stdout[:4000]


@every
def test_a_panel_says_what_it_shows_and_in_what(file: Path) -> None:
    for panel in panels(loaded(file)):
        assert len(panel["description"]) >= 20, panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix:"), (panel["title"], unit)
    titles = [(panel["title"], panel["gridPos"]["y"]) for panel in panels(loaded(file))]
    assert len(set(titles)) == len(titles)


@every
def test_no_panel_lies_on_another(file: Path) -> None:
    every_panel = loaded(file)["panels"]
    assert len({panel["id"] for panel in every_panel}) == len(every_panel)
    taken: dict[tuple[int, int], str] = {}
    for panel in every_panel:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        for cell in itertools.product(columns, rows):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


@every
def test_every_query_asks_for_what_is_selected(file: Path) -> None:
    """Each selector of our series has all variables; of recorded ones those labels that rules keep."""
    for query in queries(loaded(file)):
        selectors = re.findall(r"([\w:]+)\{([^}]*)\}", query.expr)
        assert selectors, query
        for name, selector in selectors:
            kept = ("namespace", "pool") if ":" in name else SELECTED
            assert all(f'{label}=~"${label}"' in selector for label in kept), (str(query), name)
        assert not re.findall(r"\b(?:armature|process)_\w+(?![\w{:])", query.expr), f"{query} does not select at all"


@every
def test_recorded_series_are_ours(file: Path) -> None:
    recorded = {
        rule["record"]
        for group in yaml.safe_load(plain_rules())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    for query in queries(loaded(file)):
        assert set(re.findall(r"\b\w+:\w+:\w+\b", query.expr)) <= recorded, query


@every
def test_small_dollars_have_different_ticks(file: Path) -> None:
    """With a fixed number of decimals an axis up to $0.002 says $0.001 at several ticks."""
    for panel in panels(loaded(file)):
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "timeseries" and defaults["unit"] == "currencyUSD":
            assert "decimals" not in defaults, panel["title"]


def test_objectives_are_drawn_where_alerts_have_them() -> None:
    """A line in a panel of latencies is an objective: a bound of a bucket, and one of the rules' own."""
    bounds = {float(text) for text in re.findall(r'le="([0-9.]+)"', plain_rules())}
    assert bounds <= set(SECONDS_BUCKETS)
    for file in FILES:
        for panel in panels(loaded(file)):
            expr = " ".join(target["expr"] for target in panel["targets"])
            steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
            if re.search(r"first_token|inter_token", expr) and steps:
                assert steps[-1]["value"] in bounds, (panel["title"], steps)


def test_a_cluster_is_given_them() -> None:
    """One ConfigMap for each, found by Grafana's sidecar; applied by a client it may have 262,144 bytes."""
    carried = {
        name: text
        for each in of_kind(built("components/monitoring"), "ConfigMap")
        for name, text in each["data"].items()
        if each["metadata"]["labels"].get("grafana_dashboard") == "1"
    }
    assert carried == {file.name: file.read_text() for file in FILES}
    assert all(len(text) < 200_000 for text in carried.values())


def test_what_runbooks_say_to_look_at_is_there() -> None:
    """`*service → predicted wait*` is a panel or a row of that dashboard."""
    titles = {file.stem: {panel["title"].lower() for panel in loaded(file)["panels"]} for file in FILES}
    text = " ".join((ROOT / "docs" / "alerts.md").read_text().split())
    named = re.findall(r"\*(service|fleet|engine) → ([^*]+)\*", text)
    assert len(named) >= 5
    assert not [(dashboard, title) for dashboard, title in named if title.lower() not in titles[dashboard]]
