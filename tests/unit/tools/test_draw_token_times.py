"""The picture of token times has a point for each decode step and names the causes of slow ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import draw_token_times
from tools.draw_token_times import TokenStep, decode_steps, describe, draw

COLUMNS = {
    "at": [1.0, 2.0, 3.0, 4.0],
    "seconds": [0.2, 0.010, 0.010, 0.050],
    "phase": ["prefill", "decode", "decode", "decode"],
    "tokens": [40, 1, 1, 1],
    "cause": ["", "", "", "page_fault"],
}


def test_prompts_are_left_out() -> None:
    assert decode_steps(COLUMNS) == [TokenStep(0.010), TokenStep(0.010), TokenStep(0.050, "page_fault")]


def test_the_figures_are_the_median_and_the_p99() -> None:
    assert describe(decode_steps(COLUMNS)) == (
        "3 tokens: median 10.00 ms, p99 50.00 ms, 5.00 times; slow: 1 page fault"
    )


def test_all_pages_of_the_log_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"steps": dict.fromkeys(COLUMNS, ()), "next": 12}
    replies = iter([{"next": 4}, {}, {"steps": COLUMNS, "next": 8}, {"steps": COLUMNS, "next": 12}, empty])
    asked: list[str] = []
    monkeypatch.setattr(draw_token_times, "_ask", lambda url, body=None: asked.append(url) or next(replies))
    assert len(draw_token_times.generate("http://h", 6)) == 6
    assert [url.rpartition("=")[2] for url in asked[2:]] == ["4", "8", "12"]


def test_a_cause_is_in_the_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(decode_steps(COLUMNS), "a model, one stream", tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    assert "page fault" in text and "a model, one stream" in text and "as usual" in text
