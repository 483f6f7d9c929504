"""Caveats of a result: one sentence for each circumstance, and none without a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armature_bench.compare.environment import MeasurementFacts, measurement_caveats
from armature_bench.compare.result import LoadPoint, LoadSpec

LOAD = LoadSpec(kind="embed", clients=1, tokens=128)


def point(samples: float = 100, **fields: Any) -> LoadPoint:
    return LoadPoint(load=LOAD, began=0.0, seconds=10.0, samples=samples, **fields)


def info(**fields: Any) -> dict[str, Any]:
    return {"version": "1.0", "calibration": {"measurements": {"fallback": ""}}, "speed": None} | fields


def measured(*points: LoadPoint, **changed: Any) -> MeasurementFacts:
    given = MeasurementFacts(info(), info(), "1.0", None, True, points or (point(),), (point(), point()))
    return replace(given, **changed)


def test_nothing_to_doubt() -> None:
    calm = point(109, stolen_ratio=0.05, client_cpu_ratio=0.5, throttled_seconds=0.1, pressure_ratio=0.9)
    assert measurement_caveats(measured(calm)) == []


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (measured(version="1.1"), "The server has version 1.0, the client that measured it has version 1.1."),
        (
            measured(info=info(calibration=None)),
            "The machine was not calibrated: the plan was made from hardware facts alone.",
        ),
        (
            measured(info=info(calibration={"measurements": {"fallback": "time was short"}})),
            "The machine was not calibrated, since time was short: the plan was made from hardware facts alone.",
        ),
        (
            measured(info_after=info(speed={"drifted": True, "steps_over_measured": {"decode": 1.4}})),
            "Steps did not take the time that calibration had measured (decode 1.40 times as long): the machine's speed has changed.",
        ),
        (measured(point(failures={"status 429": 3, "timeout": 1})), "4 requests failed: status 429 (3), timeout (1)."),
        (
            measured(lost_steps=7),
            "7 of the engine's steps are missing: there were more steps than the server or the result file keeps.",
        ),
        (
            measured(local=False, url="http://far:8000"),
            "The server was reached over a network, at http://far:8000: latencies include the network, and other load on its machine is "
            "unknown.",
        ),
        (
            measured(point(throttled_seconds=0.2), point(throttled_seconds=1.0)),
            "The server was throttled to its CPU quota, for 1.2 s in 2 of 4 loads.",
        ),
        (
            measured(point(stolen_ratio=0.06), point(stolen_ratio=0.3)),
            "Other processes took up to 30% of all cores, in 2 of 4 loads.",
        ),
        (
            measured(point(111)),
            "The machine was not steady: repeated measurements of one load (batch 1 of 128 tokens) reached 11.1, 10, 10 samples a second.",
        ),
        (
            measured(point(client_cpu_ratio=0.7)),
            "The measuring client took up to 70% of a core, which the server could not use, in 1 of 3 loads.",
        ),
        (measured(caveats=("Something was left out.",)), "Something was left out."),
    ],
)
def test_each_circumstance_is_a_sentence(found: MeasurementFacts, sentence: str) -> None:
    assert measurement_caveats(found) == [sentence]


def test_a_client_elsewhere_takes_no_core_of_the_server() -> None:
    found = measurement_caveats(measured(point(client_cpu_ratio=0.7), local=False, url="http://far"))
    assert "The measuring client took up to 70% of a core, in 1 of 3 loads." in found


def test_repeats_are_judged_like_all_loads() -> None:
    found = measurement_caveats(measured(repeats=(point(stolen_ratio=0.2), point(80))))
    assert "Other processes took up to 20% of all cores, in 1 of 3 loads." in found
    assert any(doubt.startswith("The machine was not steady") for doubt in found)
