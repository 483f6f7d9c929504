"""A dashboard exported by Grafana becomes the same file again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.monitoring.check_dashboards import DASHBOARDS
from tools.monitoring.tidy_dashboard import WIDTH, main, written


def backwards(value: Any) -> Any:
    """The same with each object's keys the other way round."""
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(each) for each in value] if isinstance(value, list) else value


def test_an_export_is_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (DASHBOARDS / "fleet.json").read_text()
    exported = json.loads(kept) | {"id": 17, "version": 4, "iteration": 1, "__inputs": [{"name": "DS"}], "gnetId": None}
    for panel in exported["panels"]:
        panel["pluginVersion"] = "12.0.0"
    for variable in exported["templating"]["list"]:
        variable["options"] = [{"text": "a", "value": "a"}]
    exported["templating"]["list"][0]["current"] = {"text": "mine", "value": "P1809"}
    file = tmp_path / "exported.json"
    file.write_text(json.dumps(backwards(exported)))
    monkeypatch.setattr("sys.argv", ["tidy_dashboard", str(file)])
    assert main() == 0
    assert file.read_text() == kept


def test_what_fits_is_one_line() -> None:
    short, long = {"a": [1, {"b": None}]}, {"a": "x" * WIDTH, "b": []}
    assert written({"c": short}) == '{\n  "c": {"a": [1, {"b": null}]}\n}'
    assert written({"c": long}).splitlines()[1:3] == ['  "c": {', f'    "a": "{"x" * WIDTH}",']
    assert json.loads(written({"c": [short, long]})) == {"c": [short, long]}
