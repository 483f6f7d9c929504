"""The README's chart shows the recorded figures, and the check notices a figure that it does not show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import draw_readme_chart as chart

CHARTS = [chart.FOLDER / f"peers-{theme.name}.svg" for theme in (chart.LIGHT, chart.DARK)]


def test_the_committed_charts_show_the_recorded_figures() -> None:
    assert chart.main(["--check"]) == 0, "python -m tools.draw_readme_chart"


def test_the_ratios_agree_with_the_speeds() -> None:
    """Ratios are medians over rounds, so they differ a little from the quotient of the median speeds."""
    for run in json.loads(chart.RESULTS.read_text(encoding="utf-8"))["runs"]:
        for each in run["comparisons"]:
            assert each["ours"] / each["theirs"] == pytest.approx(each["ratio"], rel=0.1), each


def test_the_figures_are_those_of_the_performance_page(root: Path) -> None:
    page = (root / "docs" / "performance.md").read_text(encoding="utf-8")
    for run in json.loads(chart.RESULTS.read_text(encoding="utf-8"))["runs"]:
        for each in run["comparisons"]:
            assert f"{each['ratio']:.2f}" in page, each
            assert f"{each['ours']:g}" in page, each
            assert f"{each['theirs']:g}" in page, each


@pytest.mark.parametrize("path", CHARTS, ids=lambda path: path.stem)
def test_a_changed_figure_is_noticed(path: Path, tmp_path: Path) -> None:
    recorded = json.loads(chart.RESULTS.read_text(encoding="utf-8"))
    recorded["runs"][1]["comparisons"][0]["ratio"] = 1.38
    (tmp_path / "peers.json").write_text(json.dumps(recorded), encoding="utf-8")
    found = chart.differences(path.read_text(encoding="utf-8"), chart.read_groups(tmp_path / "peers.json"))
    assert len(found) == 2, "the caption and the length of one bar"


def test_a_new_drawing_shows_the_recorded_figures() -> None:
    pytest.importorskip("matplotlib", reason="charts are drawn with matplotlib, the extra bench")
    groups = chart.read_groups()
    for theme in (chart.LIGHT, chart.DARK):
        assert chart.differences(chart.svg(groups, theme), groups) == []
