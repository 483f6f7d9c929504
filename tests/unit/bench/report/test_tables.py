"""Figures by load with their ratios to the first result, what steps took and why, and where plans differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, PointEnergy, StepColumns
from armature_bench.report.figures import add_prices, load_cases, load_name
from armature_bench.report.slow_steps import cause_statistics, phase_statistics
from armature_bench.report.tables import (
    ReportTable,
    TableCell,
    compared_cell,
    decision_table,
    format_three_digits,
    head_table,
    metric_tables,
    step_tables,
    unique_names,
)
from synthetic_results import GRAVITON, XEON, made_decoder, made_encoder

FIRST, SECOND = made_decoder(samples=4), made_decoder(GRAVITON, samples=4)


def tables_of(*results: CompareResult) -> dict[str, ReportTable]:
    return {table.title: table for table in metric_tables(load_cases(results), unique_names(results))}


def cells(table: ReportTable, group: str, row: str) -> dict[str, TableCell]:
    (found,) = (each for part in table.groups if part.name == group for each in part.rows if each.name == row)
    return dict(zip(table.heads, found.cells, strict=True))


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (9.999, "10.0"),
        (56.78, "56.8"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (7, "7"),
        (math.inf, "–"),
    ],
)
def test_numbers_have_three_figures(value: float, text: str) -> None:
    assert format_three_digits(value) == text


def test_a_ratio_says_whether_it_is_better() -> None:
    assert compared_cell(150.0, 100.0, True) == TableCell("150", "1.50×", "better")
    assert compared_cell(150.0, 100.0, False) == TableCell("150", "1.50×", "worse")
    assert compared_cell(104.0, 100.0, True) == TableCell("104", "1.04×", "")
    assert compared_cell(150.0, 100.0, None) == TableCell("150")
    assert compared_cell(150.0, None, True) == TableCell("150")
    assert compared_cell(None, 100.0, True) == TableCell("–")


def test_figures_stand_by_load_with_the_first_result_as_one() -> None:
    table = tables_of(FIRST, SECOND)["Throughput and request latency"]
    assert [group.name for group in table.groups] == [load_name(case.load) for case in load_cases([FIRST])]
    first, second = (cells(table, "8 clients, prompts of 128", name) for name in ("xeon-int4", "graviton-int4"))
    assert first["tokens (1/s)"].ratio == "1.00×" and first["requests"] == TableCell("8")
    points = [next(p for p in each.points if p.load.clients == 8 and p.load.tokens == 128) for each in (FIRST, SECOND)]
    rates = [point.tokens_per_second for point in points]
    assert second["tokens (1/s)"] == TableCell(format_three_digits(rates[1]), f"{rates[1] / rates[0]:.2f}×", "better")
    slowest = [max(point.request_seconds) * 1e3 for point in points]
    assert second["p99 (ms)"] == TableCell(format_three_digits(slowest[1]), f"{slowest[1] / slowest[0]:.2f}×", "better")


def test_of_one_result_there_are_no_ratios() -> None:
    tables = tables_of(FIRST)
    assert not any(
        cell.ratio for table in tables.values() for group in table.groups for row in group.rows for cell in row.cells
    )
    assert "ratio" not in tables["Token latency"].note


def test_a_load_that_one_result_lacks_is_a_dash_there() -> None:
    shorter = SECOND.model_copy(update={"points": SECOND.points[1:]})
    table = tables_of(FIRST, shorter)["Token latency"]
    assert {cell.text for cell in cells(table, "1 client, prompts of 128", "graviton-int4").values()} == {"–"}
    swapped = tables_of(shorter, FIRST)["Token latency"]
    assert cells(swapped, "1 client, prompts of 128", "xeon-int4")["TTFT p50 (ms)"].ratio == ""


def test_energy_is_reported_with_idle_and_without_and_only_where_it_is_known() -> None:
    load = LoadSpec(kind="embed", clients=1, batch=2, tokens=50)
    point = LoadPoint(load=load, began=0, seconds=10, samples=40, read_tokens=2000, request_seconds=[0.5] * 20)
    metered = point.model_copy(update={"energy": PointEnergy(joules=1000, source="rapl", idle_watts=60)})
    result = made_encoder(hourly_price=1.8).model_copy(update={"points": [metered]})
    told = cells(tables_of(result)["Energy and cost"], "1 client, 2 texts of 50", "xeon-int8")
    assert {name: cell.text for name, cell in told.items()} == {
        "mean power (W)": "100",
        "energy (J/token)": "0.500",
        "above idle (J/token)": "0.200",
        "energy (J/sample)": "25.0",
        "above idle (J/sample)": "10.0",
        "cost ($/M tokens)": "2.50",
        "cost ($/M samples)": "125",
    }
    no_idle = metered.model_copy(update={"energy": PointEnergy(joules=1000, source="modelled")})
    heads = tables_of(result.model_copy(update={"points": [no_idle], "hourly_price": None}))["Energy and cost"].heads
    assert heads == ("mean power (W)", "energy (J/token)", "energy (J/sample)")
    assert "Energy and cost" not in tables_of(made_decoder(replace(XEON, watts=None), samples=1))


STEPS = StepColumns(
    at=[float(index) for index in range(24)],
    seconds=[*[0.010] * 18, 0.100, 0.020, *[0.300] * 4],
    phase=[*["decode"] * 20, *["prefill"] * 4],
    tokens=[8] * 20 + [512] * 4,
    cause=[""] * 18 + ["descheduled", "page_fault"] + [""] * 4,
)


def stepped() -> CompareResult:
    return FIRST.model_copy(update={"points": [FIRST.points[0].model_copy(update={"steps": STEPS})]})


def test_the_tail_is_reported_in_milliseconds_and_in_what_such_steps_take() -> None:
    decode, prefill = phase_statistics(stepped())
    assert (decode.name, decode.num_steps, decode.seconds) == ("decode", 20, (0.010, 0.100, 0.100, 0.100))
    assert decode.over_usual == pytest.approx((10, 10, 10))
    assert prefill.seconds == (0.3,) * 4 and prefill.over_usual == (1, 1, 1)


def test_what_slow_steps_lost_stands_by_cause_the_worst_first() -> None:
    worst, other = cause_statistics(stepped())
    whole = sum(STEPS.seconds)
    assert (worst.name, worst.num_steps, worst.share, worst.longest_seconds) == ("descheduled", 1, 1 / 24, 0.1)
    assert worst.lost_share == pytest.approx(0.090 / whole)
    assert (other.name, other.lost_share) == ("page_fault", pytest.approx(0.010 / whole))


def test_without_steps_there_are_no_tables_of_them() -> None:
    bare = FIRST.model_copy(update={"points": [FIRST.points[0].model_copy(update={"steps": StepColumns()})]})
    assert step_tables([bare], ["bare"]) == []
    both = step_tables([bare, stepped()], ["bare", "stepped"])
    assert [group.name for table in both for group in table.groups] == ["stepped", "stepped"]


def test_only_decisions_that_differ_are_shown_with_their_reasons() -> None:
    table = decision_table([FIRST, SECOND], unique_names([FIRST, SECOND]))
    assert table is not None and [row.name for row in table.groups[0].rows] == ["kernels", "threads"]
    assert table.groups[0].rows[1].cells[1].text == "16: 16 physical cores may be used."
    assert decision_table([FIRST, FIRST], ["a", "b"]) is None
    measured = FIRST.info["plan"] | {"roofline_ratio": {"value": {"decode": 0.8}, "reason": "As measured."}}
    quicker = FIRST.info["plan"] | {"roofline_ratio": {"value": {"decode": 0.9}, "reason": "As measured."}}
    plans = [FIRST.model_copy(update={"info": FIRST.info | {"plan": plan}}) for plan in (measured, quicker)]
    assert decision_table(plans, ["a", "b"]) is None


def test_the_head_says_what_was_compared() -> None:
    flags = ["--precision=int4", "--model=/home/somebody/models/small"]
    given = FIRST.model_copy(update={"instance": "m7i.4xlarge", "hourly_price": 1.42, "flags": flags})
    table = head_table(add_prices([given, SECOND]), unique_names([given, SECOND]))
    rows = {row.name: [cell.text for cell in row.cells] for row in table.groups[0].rows}
    assert rows["machine"] == ["Intel Xeon Platinum 8488C, 8 cores", "Arm Neoverse-V2, 16 cores"]
    assert rows["instance"] == ["m7i.4xlarge", "–"] and rows["price"] == ["$1.42 an hour", "–"]
    assert rows["price read"] == ["the operator's setting", "–"]
    assert rows["measured"][0] == "2026-09-21 14:13 UTC, by version 0.1.0"
    assert rows["server's flags"] == ["--precision=int4 --model=small", "–"]
    assert "server's flags" not in [row.name for row in head_table(add_prices([SECOND]), ["one"]).groups[0].rows]


def test_a_named_instance_has_the_price_of_the_table_unless_the_operator_says_another() -> None:
    named = FIRST.model_copy(update={"instance": "c6i.large"})
    (found,) = add_prices([named])
    assert found.result.hourly_price == 0.085
    assert found.origin.startswith("us-east-1, 2026-") and "https://" in found.origin
    assert add_prices([named.model_copy(update={"hourly_price": 2.0})])[0].result.hourly_price == 2.0
    assert add_prices([FIRST.model_copy(update={"instance": "no.such"})])[0].origin == ""
