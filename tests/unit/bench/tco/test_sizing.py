"""From measured points to machines: the p99 decides the load, the cores the size, and nothing is known that was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import synthetic_results
from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, PointEnergy
from armature_bench.console import MeasurementFailed
from armature_bench.tco.capacity import P99Exceeded, ServingTarget, SustainedLoad, best_sustained_load, points_by_work
from armature_bench.tco.prices import read_prices
from armature_bench.tco.sizing import SizingRow, SizingSheet, sizing_sheets

PRICES = read_prices(None)
X86 = synthetic_results.Machine("xeon", "x86_64", "Intel", "Xeon", cores=8, threads_a_core=2)
ARM = synthetic_results.Machine("arm", "arm64", "Arm", "Neoverse-V1", cores=16, threads_a_core=1)


def point(rate: float, latency: float, clients: int = 1, requests: int = 100, **changes: Any) -> LoadPoint:
    """`rate` samples a second of 10 tokens for 10 seconds; every request took `latency` seconds."""
    load = LoadSpec(kind="embed", clients=clients, batch=1, tokens=128)
    fields: dict[str, Any] = {
        "load": load,
        "began": 0.0,
        "seconds": 10.0,
        "samples": rate * 10,
        "read_tokens": int(rate * 100),
        "request_seconds": [latency] * requests,
    }
    return LoadPoint(**(fields | changes))


def result(points: Sequence[LoadPoint], machine: synthetic_results.Machine = X86, **changes: Any) -> CompareResult:
    return synthetic_results.made_encoder(machine, points=[each.model_dump() for each in points], **changes)


def sheet(*results: CompareResult, target: ServingTarget | None = None, limit: float | None = None) -> SizingSheet:
    (found,) = sizing_sheets(results, PRICES, target or ServingTarget(1000), limit)
    return found


def row(found: SizingSheet, name: str) -> SizingRow:
    return next(each for each in found.rows if each.machine.name == name)


POINTS = (point(50, 0.010), point(90, 0.030, clients=4), point(100, 0.200, clients=32))


def test_the_quickest_load_that_keeps_the_p99_decides() -> None:
    kept = best_sustained_load(POINTS, "samples", 0.050)
    assert isinstance(kept, SustainedLoad)
    assert (kept.rate, kept.peak, kept.p99) == (90, 100, 0.030)
    assert kept.utilisation == pytest.approx(0.9)


def test_with_no_p99_asked_for_machines_run_at_their_peak() -> None:
    kept = best_sustained_load(POINTS, "samples", None)
    assert isinstance(kept, SustainedLoad)
    assert kept.utilisation == 1


def test_a_p99_that_no_load_keeps_is_said() -> None:
    assert best_sustained_load(POINTS, "samples", 0.005) == P99Exceeded(0.010)
    found = sheet(result(POINTS), limit=0.005)
    assert not found.rows
    assert "no measured load kept a p99 of 5 ms; the lowest was 10 ms" in found.notes[0]


def test_the_p99_is_of_the_samples_themselves() -> None:
    """One slow request of a hundred is none too many, two are."""
    one, two = ([0.01] * (100 - slow) + [1.0] * slow for slow in (1, 2))
    assert isinstance(best_sustained_load([point(50, 0, request_seconds=one)], "samples", 0.02), SustainedLoad)
    assert isinstance(best_sustained_load([point(50, 0, request_seconds=two)], "samples", 0.02), P99Exceeded)


def test_where_nothing_was_timed_no_p99_is_kept() -> None:
    assert best_sustained_load([point(50, 0, request_seconds=[])], "samples", 1) == P99Exceeded(None)


def test_few_requests_make_a_p99_of_the_slowest() -> None:
    assert "the slowest of 20 requests" in sheet(result([point(50, 0.01, requests=20)]), limit=1).notes[0]
    assert not sheet(result([point(50, 0.01)]), limit=1).notes


def test_points_of_which_a_request_failed_are_left_out() -> None:
    failed = result([point(50, 0.01), point(80, 0.01, failures={"timeout": 1})])
    (points,) = points_by_work(failed).values()
    assert len(points) == 1


def test_work_of_other_lengths_is_another_sheet() -> None:
    longer = point(10, 0.1, load=LoadSpec(kind="embed", clients=1, tokens=512))
    found = sizing_sheets([result([*POINTS, longer])], PRICES, ServingTarget(1000), None)
    assert [each.work.tokens for each in found] == [128, 512]
    assert found[1].rows[0].machines == 100


def test_machines_dollars_and_watts_of_the_measured_size() -> None:
    counted = PointEnergy(joules=1000, source="rapl")
    found = row(sheet(result([point(100, 0.01, energy=counted)], instance="c6i.4xlarge")), "c6i.4xlarge")
    assert found.machines == 10
    assert found.annual_dollars == pytest.approx(10 * 0.68 * 8760)
    assert found.dollars_per_million_samples == pytest.approx(10 * 0.68 / 3.6)
    assert found.dollars_per_million_tokens == pytest.approx(10 * 0.68 / 36)
    assert (found.watts, found.watts_basis) == (pytest.approx(10 * 100), "measured (rapl)")


def test_other_sizes_go_by_cores() -> None:
    found = sheet(result([point(100, 0.01)], instance="c6i.4xlarge"))
    half, twice = row(found, "c6i.2xlarge"), row(found, "c6i.8xlarge")
    assert (half.rate, half.machines) == (50, 20)
    assert (twice.rate, twice.machines) == (200, 5)
    assert twice.machine.cores == 16
    assert (half.watts, half.watts_basis) == (pytest.approx(20 * 300 / 32 * 4), "TDP, crowd-sourced")
    assert {each.machine.name.split(".")[0] for each in found.rows} == {"c6i"}, "never into another family"


def test_a_size_that_cannot_hold_the_weights_is_left_out() -> None:
    info = synthetic_results.made_info(X86, "int8", "encoder")
    info["plan"]["weight_bytes"] = {"value": 6 * 2**30, "reason": ""}
    names = [each.machine.name for each in sheet(result([point(100, 0.01)], instance="c6i.4xlarge", info=info)).rows]
    assert "c6i.large" not in names
    assert "c6i.xlarge" in names


def test_a_target_of_tokens_goes_by_tokens() -> None:
    found = sheet(result([point(100, 0.01)]), target=ServingTarget(5000, "tokens")).rows[0]
    assert (found.rate, found.machines) == (1000, 5)


def test_without_a_price_there_are_no_dollars_and_the_rest_stands() -> None:
    found = sheet(result([point(100, 0.01)])).rows[0]
    assert (found.machines, found.annual_dollars, found.dollars_per_million_samples) == (10, None, None)
    named = sheet(result([point(100, 0.01)], instance="a machine of ours")).rows[0]
    assert (named.machine.name, named.machines, named.annual_dollars) == ("a machine of ours", 10, None)


def test_the_operators_own_price_goes_before_the_tables_for_what_they_measured() -> None:
    found = sheet(result([point(100, 0.01)], instance="c6i.4xlarge", hourly_price=0.5))
    assert row(found, "c6i.4xlarge").machine.dollars_an_hour == 0.5
    assert row(found, "c6i.8xlarge").machine.dollars_an_hour == 1.36


def test_arm_is_held_against_x86_of_as_many_vcpus() -> None:
    found = sheet(
        result([point(100, 0.01)], instance="c6i.4xlarge"), result([point(120, 0.02)], ARM, instance="c7g.4xlarge")
    )
    pair = next(each for each in found.pairs if each.arm.machine.vcpus == 16)
    assert (pair.arm.machine.name, pair.x86.machine.name) == ("c7g.4xlarge", "c6i.4xlarge")
    assert pair.dollars == pytest.approx(9 * 0.58 / (10 * 0.68))
    assert pair.p99 == pytest.approx(2), "20 ms against 10"
    assert pair.machines == pytest.approx(0.9)
    assert pair.watts == pytest.approx(9 * 55 / (10 * 75)), "both by TDP"
    assert all(each.arm.machine.vcpus == each.x86.machine.vcpus for each in found.pairs)


def test_the_cheapest_is_named_the_fewest_machines_of_equals() -> None:
    found = sheet(
        result([point(100, 0.01)], instance="c6i.4xlarge"), result([point(120, 0.01)], ARM, instance="c7g.4xlarge")
    )
    assert found.cheapest is not None
    assert found.cheapest.annual_dollars == min(each.annual_dollars or 0 for each in found.rows)
    equals = [each for each in found.rows if each.annual_dollars == found.cheapest.annual_dollars]
    assert found.cheapest.machines == min(each.machines for each in equals)
    assert sheet(result([point(100, 0.01)])).cheapest is None


def test_watts_of_unequal_kinds_are_no_ratio() -> None:
    counted = point(120, 0.01, energy=PointEnergy(joules=500, source="rapl"))
    found = sheet(result([point(100, 0.01)], instance="c6i.4xlarge"), result([counted], ARM, instance="c7g.4xlarge"))
    assert all(pair.watts is None for pair in found.pairs)


def test_modelled_watts_go_behind_the_tables() -> None:
    modelled = point(100, 0.01, energy=PointEnergy(joules=500, source="modelled"))
    assert row(sheet(result([modelled], instance="c6i.4xlarge")), "c6i.4xlarge").watts_basis == "TDP, crowd-sourced"
    assert sheet(result([modelled])).rows[0].watts_basis == "modelled"


@pytest.mark.parametrize(
    ("instance", "changes", "complaint"),
    [
        ("c6i.16xlarge", {}, "has 64 vCPUs, the measured machine has 16"),
        ("c7g.4xlarge", {}, "the instance is arm64, the measured machine is x86_64"),
        ("c6i.4xlarge", {"quota_cores": 2.0}, "limited to 2"),
    ],
)
def test_a_machine_that_cannot_have_been_measured_is_refused(
    instance: str, changes: dict[str, Any], complaint: str
) -> None:
    info = synthetic_results.made_info(X86, "int8", "encoder")
    info["facts"]["cgroup"] |= changes
    with pytest.raises(MeasurementFailed, match=complaint):
        sheet(result(POINTS, instance=instance, info=info))


def test_a_row_with_cards_says_nothing_of_the_processor() -> None:
    host = synthetic_results.Machine("host", cores=2, threads_a_core=2)
    found = sheet(result([point(100, 0.01)], host, instance="g6.xlarge"))
    assert row(found, "g6.12xlarge").rate == 400
    assert row(found, "g6.xlarge").machine.architecture == "gpu"
