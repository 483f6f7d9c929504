"""A picture has every panel in its place, with what its queries answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tools.check_dashboards import DASHBOARDS, Prometheus, Window
from tools.draw_dashboards import draw, drawn, told

WINDOW = Window(1000.0, 1060.0)


def prometheus(value: str) -> Prometheus:
    """Answers every query with one series of two moments."""
    metric = {"le": "0.5", "pool": "arm64", "phase": "decode", "instance": "a"}
    series = {"metric": metric, "value": [1060, value], "values": [[1000, value], [1060, value]]}

    def answer(request: httpx.Request) -> httpx.Response:
        names = request.url.path.endswith("/values")
        return httpx.Response(200, json={"status": "success", "data": ["arm64"] if names else {"result": [series]}})

    return Prometheus(httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer)))


def one_of_each_type() -> dict[str, Any]:
    fleet, service = (json.loads((DASHBOARDS / f"{name}.json").read_text()) for name in ("fleet", "service"))
    first = {panel["type"]: panel for panel in reversed(fleet["panels"] + service["panels"])}
    return {**service, "panels": list(first.values())}


def test_every_panel_is_on_it() -> None:
    dashboard = one_of_each_type()
    assert {panel["type"] for panel in dashboard["panels"]} == {"row", "table", "timeseries", "stat", "heatmap"}
    figure = drawn(prometheus("0.25"), dashboard, WINDOW)
    titles = {text.get_text() for text in figure.texts} | {
        text.get_text() for axes in figure.axes for text in axes.texts
    }
    assert {panel["title"] for panel in dashboard["panels"]} <= titles
    assert {"arm64", "25%", "250 ms", "0.25"} <= titles, (
        "the table's row, its share and its wait, and the figure of now"
    )


def test_a_png_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dashboards"
    folder.mkdir()
    (folder / "some.json").write_text(json.dumps(one_of_each_type()))
    monkeypatch.setattr("tools.draw_dashboards.DASHBOARDS", folder)
    draw(prometheus("NaN"), WINDOW, tmp_path / "pictures")
    with Image.open(tmp_path / "pictures" / "some.png") as picture:
        assert picture.size[0] > 1000


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.1234, "percentunit", "12.3%"),
        (0.0123, "s", "12.3 ms"),
        (12.0, "s", "12 s"),
        (3 * 2**20, "bytes", "3 MiB"),
        (0.5, "currencyUSD", "$0.500"),
        (1234.0, "suffix: tok/s", "1,234 tok/s"),
        (7.0, "watt", "7 W"),
    ],
)
def test_a_number_has_its_unit(value: float, unit: str, words: str) -> None:
    assert told(value, unit) == words
