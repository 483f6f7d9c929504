"""What makes a drawn panel readable: labels that differ, colours that differ, and legends that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from tools.monitoring.draw_dashboards import HUES, Shown, _lines, decimal_step, number, tick_labels, told


def panel(unit: str, **custom: Any) -> dict[str, Any]:
    return {"type": "timeseries", "title": "Shown", "fieldConfig": {"defaults": {"unit": unit, "custom": custom}}}


def drawn(shown: Sequence[Shown], what: Mapping[str, Any]) -> Any:
    axes = Figure(figsize=(4, 2.6)).add_axes((0.2, 0.4, 0.7, 0.5))
    _lines(axes, what, shown)
    return axes


def series(count: int, top: float = 1.0) -> list[Shown]:
    return [
        Shown(f"pool {number}", {}, [(float(at), top * (number + 1) / count * at / 60) for at in range(0, 61, 5)], "A")
        for number in range(count)
    ]


@given(st.floats(1e-7, 1e9), st.integers(2, 6), st.sampled_from(["currencyUSD", "s", "percentunit", "short"]))
def test_labels_of_an_axis_differ(step: float, count: int, unit: str) -> None:
    labels = tick_labels([step * index for index in range(count)], unit)
    assert len(set(labels)) == count


def test_small_dollars_are_told_apart() -> None:
    assert tick_labels([0.0, 0.0005, 0.001, 0.0015], "currencyUSD") == ["$0", "$0.0005", "$0.001", "$0.0015"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "short", "0"),
        (1234.5, "short", "1,234"),
        (12345.0, "suffix: tok/s", "12.3k tok/s"),
        (2.5e7, "short", "25M"),
        (0.0123, "s", "12.3 ms"),
        (0.5, "percentunit", "50%"),
        (3 * 2**20, "bytes", "3 MiB"),
        (0.00004, "currencyUSD", "$0.00004"),
    ],
)
def test_numbers_as_text(value: float, unit: str, text: str) -> None:
    assert told(value, unit) == text


@given(st.floats(1e-6, 1e12))
def test_a_number_keeps_its_digits(value: float) -> None:
    text = number(value, 4)
    size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kMG").replace(",", "")) * size, value, rel_tol=2e-3)


@given(st.floats(1e-3, 1e6))
def test_steps_are_round(least: float) -> None:
    assert least <= decimal_step(least) <= 2.5001 * least


@pytest.mark.parametrize("count", [1, 5, 12, 20])
def test_no_two_lines_look_alike_and_a_legend_says_what_it_leaves_out(count: int) -> None:
    axes = drawn(series(count), panel("short"))
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(looks) == count
    assert len(set(HUES)) == len(HUES) == 10
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    if len(words) < count:
        assert words[-1] == f"and {count - len(words) + 1} more"
        assert words[0].startswith(f"pool {count - 1} "), "the highest are named"


@pytest.mark.parametrize(
    ("unit", "top", "custom"), [("currencyUSD", 0.002, {}), ("bytes", 3e8, {}), ("s", 5.0, {"scaleDistribution": {}})]
)
def test_an_axis_has_several_labels_and_none_twice(unit: str, top: float, custom: dict[str, Any]) -> None:
    shown = [Shown(one.legend, {}, one.points[3:], "A") for one in series(2, top)]
    what = panel(unit, **({"scaleDistribution": {"type": "log"}} if custom else {}))
    labels = [text.get_text() for text in drawn(shown, what).get_yticklabels()]
    assert 2 <= len(labels) <= 10
    assert len(set(labels)) == len(labels)
