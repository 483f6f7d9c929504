"""Machines that somebody types in: how they are read, what they cost, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.cli.main import main
from armature_bench.console import MeasurementFailed
from armature_bench.tco.capacity import ServingTarget
from armature_bench.tco.command import CostArguments, run_tco
from armature_bench.tco.declared import DeclaredMachine, cost_difference, declared_costs, parse_machine

OURS, THEIRS = "ours=100,20,200,1", "theirs=150,10,-,1.2"


def test_a_machine_is_read_from_its_figures() -> None:
    assert parse_machine("a rack=165, 23,150,2.09") == DeclaredMachine("a rack", 165, 23, 150, 2.09)
    assert parse_machine("a=b=1,-,-,-") == DeclaredMachine("a=b", 1, None, None, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ours", "write NAME=RATE,P99_MS,WATTS,PRICE"),
        ("=1,2,3,4", "write NAME="),
        ("ours=1,2,3", "write NAME="),
        ("ours=1,2,3,4,5", "write NAME="),
        ("ours=-,2,3,4", "the rate must be known"),
        ("ours=fast,2,3,4", "'fast' is not a number"),
        ("ours=1,0,3,4", "'0' must be above 0"),
        ("ours=1,2,nan,4", "'nan' must be above 0"),
        ("ours=1,2,3,inf", "'inf' must be above 0"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_form(text: str, complaint: str) -> None:
    with pytest.raises(MeasurementFailed, match=complaint):
        parse_machine(text)


def test_what_is_not_stated_has_no_cost() -> None:
    ours, theirs = declared_costs([parse_machine(OURS), parse_machine(THEIRS)], ServingTarget(1000), 100)
    assert (ours.machines, ours.annual_dollars, ours.watts) == (10, pytest.approx(1000), 2000)
    assert (theirs.machines, theirs.annual_dollars, theirs.watts) == (7, pytest.approx(840), None)
    less = cost_difference(ours, theirs)
    assert (less.dollars, less.dollars_share) == (pytest.approx(160), pytest.approx(0.16))
    assert (less.p99_share, less.watts_share) == (0.5, None)


def printed(capsys: pytest.CaptureFixture[str], status: int = 0, **asked: Any) -> str:
    assert run_tco(CostArguments(**asked)) == status
    return capsys.readouterr().out


def test_machines_are_printed_with_latency_and_power_beside_cost(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, machines=(OURS, THEIRS), target="1000/s", hours_a_day=10, days_a_year=10)
    assert "As given by --machine: 1,000 samples a second, 100 hours a year" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["ours", "100", "20", "200", "1", "10.00", "10", "1,000", "2.778", "2", "0.50"] in lines
    assert ["theirs", "ours", "7", ":", "10", "160", "16.0%", "50.0%"] in lines


def test_tokens_are_counted_where_the_target_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "$/M tokens" in printed(capsys, machines=(OURS,), target="5000tok/s")


def test_a_machine_beyond_the_p99_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, machines=(OURS, THEIRS, "late=9,-,-,-"), target="1/s", p99_ms=15)
    assert "ours is left out: its p99 of 20 ms is above 15 ms." in out
    assert "late is left out: its p99 is not stated" in out
    assert "The others" not in out
    assert "left out" in printed(capsys, status=1, machines=(OURS,), target="1/s", p99_ms=15)


def test_it_is_one_object_of_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(printed(capsys, machines=(OURS, THEIRS), target="1000/s", json=True))["declared"]
    assert [line["machines"] for line in fields["lines"]] == [10, 7]
    assert fields["lines"][0]["rate_per_watt"] == 0.5
    assert fields["differences"][0]["p99_share"] == 0.5


def test_with_the_published_ones_the_target_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, machines=(OURS,), published=True)
    assert "As given by --machine: 10,000 samples a second" in out
    assert "As published: BERT-Large at 10,000 samples a second" in out


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"machines": (OURS,)}, "--target is missing"),
        ({"machines": (OURS, "ours=1,2,3,4"), "target": "1/s"}, "--machine ours is given twice"),
        ({"machines": (OURS,), "target": "1/s", "hours_a_day": 25.0}, "--hours-a-day must be above 0 and at most 24"),
        ({"published": True, "days_a_year": 0.0}, "--days-a-year must be above 0 and at most 366"),
        ({"published": True, "target": "1tok/s"}, "counts samples"),
    ],
)
def test_what_says_nothing_is_refused(asked: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MeasurementFailed, match=complaint):
        run_tco(CostArguments(**asked))


def test_the_command_line_takes_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", "500/s", "--hours-a-day", "10", "--days-a-year", "250", "--machine", OURS, "--machine", THEIRS]
    assert main(["tco", "--published", *given]) == 0
    out = capsys.readouterr().out
    assert "As published: BERT-Large at 500 samples a second, 2,500 hours a year" in out
    assert "theirs" in out
