"""Lanes compared with dividing every operation: steps, variants, and output."""

from __future__ import annotations

import time

from app.engine.encoder.cpu_runner import LanePlanner
from tools.measure.encoder_lanes import STEPS, TOGETHER, WAYS, neighbour, steps, told, way


def test_steps_are_of_the_texts_that_were_named_or_drawn_alike_each_time() -> None:
    (spans,) = steps("3x20")
    assert [span.num_tokens for span in spans] == [20, 20, 20]
    drawn = [[span.num_tokens for span in step] for step in steps("mixed:256")]
    assert drawn == [[span.num_tokens for span in step] for step in steps("mixed:256")]
    assert len(drawn) == 20 and all(sum(lengths) == 256 for lengths in drawn)
    assert all(list(steps(name)) for name in STEPS.split(","))


def test_the_first_way_has_no_lanes() -> None:
    ways = {name: way(name) for name in WAYS.split(",")}
    assert next(iter(ways)) == TOGETHER and not ways[TOGETHER].plan([128] * 8, 2).ends
    assert (
        ways["64x2"] == LanePlanner(min_lane_tokens=64, max_lanes_per_thread=2)
        and len(ways["64x2"].plan([64] * 8, 2).ends) == 4
    )


def test_least_and_median_and_how_much_quicker() -> None:
    division = [0.004, 0.008, 0.006]
    assert told(division, division, TOGETHER) == "division 4.00 / 6.00 ms"
    assert told([0.002, 0.003, 0.004], division, "64x2") == "64x2 2.00 / 3.00 ms (2.00, 2.00)"


def test_the_neighbour_computes_until_it_is_no_longer_wanted() -> None:
    with neighbour(0.0) as nobody:
        assert nobody is None
    before = time.monotonic()
    with neighbour(0.001):
        pass
    assert time.monotonic() - before < 30.0
