"""What `armature bench http` draws: characters in the terminal, and a page that needs nothing beside it and runs nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from app.cli.parser import parse_arguments
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed
from armature_bench.report.load_page import MAX_DOTS, check_page, render_load_page, write_load_page
from armature_bench.report.load_picture import draw_distribution, draw_over_time, load_picture
from armature_bench.report.load_series import MEASURES, LoadSeries, load_series, log_bounds, log_place

EVIL = '<script>alert(1)</script> "quoted"'
DAY = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def run(level: str, firsts: list[float], server: str = "ours") -> dict[str, Any]:
    requests = [
        {
            "client": 0,
            "intended": float(at),
            "first_token": first,
            "last_token": first + 0.9,
            "tokens": 10,
            "pieces": 10,
        }
        for at, first in enumerate(firsts)
    ]
    return {"level": level, "server": server, "requests": requests}


RUNS = [run("×1", [0.01, 0.02, 0.04]), run("×8", [0.08, 0.32, 0.64, 0.64])]
FIGURES = (
    Figure("×1 tokens", 28.5, "tok/s", parts={"overall": 28.0}),
    Figure("×1 TTFT", 20, "ms", p99=40, parts={"p90": 39, "p95": 40}),
)
OUTCOME = BenchOutcome("http", f"fox {EVIL}", FIGURES, {"runs": RUNS}, True, (f"A note of {EVIL}",))


def printed(runs: list[dict[str, Any]]) -> list[str]:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(load_picture(runs))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_series_are_those_that_the_requests_have() -> None:
    found = {measure.name: series for measure, series in load_series(RUNS).items()}
    assert list(found) == ["TTFT", "TPOT", "E2E"]
    assert found["TTFT"][0] == LoadSeries("×1", (0.0, 1.0, 2.0), (0.01, 0.02, 0.04))
    assert found["TPOT"][0].seconds == pytest.approx((0.1, 0.1, 0.1))
    embedded = {"level": "2/s", "server": "http://a:1", "requests": [{"intended": 0.5, "answered": 0.1, "texts": 1}]}
    [(measure, [series])] = load_series([embedded]).items()
    assert (measure.name, series.label, series.seconds) == ("latency", "2/s", (0.1,))
    short = {"intended": 0.0, "first_token": 0.1, "last_token": 0.1, "tokens": 1, "pieces": 1}
    assert MEASURES[1].seconds(short) is None, "one token has no later one"


def test_rounds_are_together_and_servers_apart() -> None:
    runs = [run("×1", [0.01]), run("×1", [0.02], "http://peer:1"), run("×1", [0.03])]
    [first, second] = next(iter(load_series(runs).values()))
    assert (first.label, first.seconds) == ("×1 ours", (0.01, 0.03))
    assert (second.label, second.seconds) == ("×1 peer:1", (0.02,))


def test_places_on_the_axis() -> None:
    bounds = log_bounds([LoadSeries("", (0.0, 1.0), (0.01, 1.0))])
    assert [log_place(seconds, bounds) for seconds in (0.001, 0.01, 0.1, 1.0, 2.0)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert log_bounds([LoadSeries("", (0.0,), (0.01,))]) == (0.01, 0.02)


def test_the_picture() -> None:
    lines = printed(RUNS)
    assert lines[1] == "TTFT: time to the first token"
    assert re.fullmatch(r" +p50, ms +10 ms +to 640 ms +over time, 0 to 640 ms", lines[2])
    assert [line.split()[:2] for line in lines[3:5]] == [["×1", "20"], ["×8", "480"]]
    assert lines[3].count("█") == 3, "each bar of the distribution is one request"
    assert "\x1b" not in "".join(lines)


def test_bars() -> None:
    series = LoadSeries("", (0.0, 5.0, 10.0), (0.01, 0.01, 1.0))
    assert draw_distribution(series, (0.01, 1.0)) == "█" + " " * 30 + "▅"
    assert draw_over_time(series, 1.0) == "▁" + " " * 11 + "▁" + " " * 10 + "█"
    alone = LoadSeries("", (0.0,), (0.01,))
    assert draw_distribution(alone, (0.01, 0.02)) == draw_over_time(alone, 0.01) == ""
    assert len(printed([run("×1", [0.0])])) > 3, "a latency of nothing can be drawn"


def test_the_page_is_whole_and_runs_nothing() -> None:
    page = render_load_page(OUTCOME, "9.9", DAY)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.findall(r'(?:href|src)="(?!#)', page)
    assert "Measured by armature bench http 9.9, 2026-01-02 03:04 UTC." in page
    assert "×1 tokens: 28.5 tok/s." in page
    assert re.search(r"<th scope=\"row\" class=\"row\">×1 TTFT</th>\s*<td>20</td>\s*<td>39</td>", page)
    assert re.findall(r"<h2 [^>]+>(\w+)</h2>", page) == ["TTFT", "TPOT", "E2E", "Figures"]


def test_the_plots_are_well_formed_and_have_words() -> None:
    labelled = {"runs": [run(EVIL, [0.01, 0.02]), *RUNS]}
    page = render_load_page(replace(OUTCOME, details=labelled), "9.9", DAY)
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(plots) == 6
    for plot in plots:
        assert plot.attrib["role"] == "img"
        assert "×8 from " in plot.attrib["aria-label"]
        assert EVIL in {text.text for text in plot.iter("text")}
        x, y, width, height = map(float, plot.attrib["viewBox"].split())
        for found in re.findall(r"translate\(([-\d.]+),([-\d.]+)\)", ElementTree.tostring(plot).decode()):
            assert x <= float(found[0]) <= width
            assert y <= float(found[1]) <= height
    colours = re.findall(r"(?:stroke|fill): ([^\";]+)", "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL)))
    assert set(colours) <= {"var(--ink)", "var(--muted)", "var(--grid)", *(f"var(--series-{n})" for n in range(6))}


def test_very_many_requests_are_thinned_and_the_slowest_stay() -> None:
    many = run("×1", [0.01 + 0.000001 * number for number in range(20_000)])
    many["requests"][777]["first_token"] = 5.0
    page = render_load_page(replace(OUTCOME, details={"runs": [many]}), "9.9", DAY)
    svg = re.findall(r"<svg.*?</svg>", page, re.DOTALL)[1]
    assert MAX_DOTS < svg.count("translate(") < 1.3 * MAX_DOTS
    assert "×1 from 10 ms to 5,000 ms" in page
    assert ",40.0)" in svg, "the slowest is at the top"


def test_an_interrupted_bench_has_a_caveat() -> None:
    page = render_load_page(replace(OUTCOME, complete=False), "9.9", DAY)
    assert "Interrupted: these are the requests until then." in page
    assert 'class="doubts"' in page


def test_a_place_that_cannot_be_is_refused_before_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"is a directory: name a file such as .*load\.html"):
        check_page(tmp_path)
    with pytest.raises(MeasurementFailed, match="does not exist"):
        check_page(tmp_path / "none" / "page.html")
    check_page(tmp_path / "page.html")
    write_load_page(OUTCOME, tmp_path / "page.html", "9.9")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_flag_is_a_file_here_and_a_folder_elsewhere() -> None:
    assert parse_arguments(["bench", "http", "--report", "a.html"]).report == Path("a.html")
    assert parse_arguments(["bench", "compare", "a.json", "--report", "a"]).report == Path("a")
