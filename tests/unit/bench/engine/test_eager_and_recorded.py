"""Eager and recorded steps of one engine: each mode is switched on for its samples, and all are compared with FP32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from app.bench.engine.driver import DecoderDriver
from app.bench.engine.recording import EAGER, RECORDED, ReplayMode, _figures
from app.engine.decoder.cpu_runner import DecoderReplay


class Paced:
    """A driver whose steps take as long as they do while the replay is as it is."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay

    def decode(self, rows: int, steps: int) -> list[float]:
        return [0.004 * rows if self.replay.reason else 0.001 * rows] * steps


def test_ways_take_turns_on_one_engine() -> None:
    replay = SimpleNamespace(reason="")
    driver = cast(DecoderDriver, Paced(replay))
    ways = [
        ReplayMode(name, how, driver, cast(DecoderReplay, replay))
        for name, how in (("int4", EAGER), ("int4", RECORDED), ("fp32", EAGER))
    ]
    for _ in range(2):
        for way in ways:
            way.measure(8)
    found = list(_figures(ways))
    assert [figure.name for figure in found] == [
        "decode ×8, int4, eager",
        "decode ×8, int4, recorded",
        "decode ×8, fp32, eager",
    ]
    assert [figure.ratio for figure in found] == [1.0, 4.0, 1.0]
    assert [round(figure.parts["tok/s"]) for figure in found] == [250, 1000, 250]
