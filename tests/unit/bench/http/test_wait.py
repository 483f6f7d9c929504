"""What a server says of its speed against what it does: the arithmetic, on a server that answers at once and says what we want."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from armature_bench.console import MeasurementFailed
from armature_bench.http import wait
from armature_bench.http.client import OnChunk, StreamTiming
from armature_bench.http.wait import ReportedCapacity, RequestMix, WaitSample, steady_throughput
from armature_bench.http.workload import TokenPrompts

TOLD = {
    'armature_capacity_tokens_per_second{phase="decode",rows="1"}': 50.0,
    'armature_capacity_tokens_per_second{phase="decode",rows="4"}': 128.0,
    'armature_capacity_tokens_per_second{phase="decode",rows="32"}': 256.0,
    'armature_capacity_tokens_per_second{phase="prefill",rows="32"}': 400.0,
    'armature_capacity_tokens_per_second{phase="prefill",rows="128"}': 640.0,
    "armature_predicted_wait_seconds": 0.3,
    "armature_other": 1.0,
}


def test_capacity_is_reported_at_the_most_rows_that_may_run() -> None:
    assert ReportedCapacity.of(TOLD, 64) == ReportedCapacity(32, 640.0, 256.0, 0.02)
    assert ReportedCapacity.of(TOLD, 8) == ReportedCapacity(4, 640.0, 128.0, 0.02)
    asks = RequestMix(1024)
    assert ReportedCapacity(32, 640.0, 256.0, 0.02).requests_per_second(asks) == pytest.approx(
        1 / (256 / 640 + 512 / 256)
    )
    dealt = [asks.draw(TokenPrompts(range(9)), Random(number)) for number in range(200)]
    assert {len(prompt) for prompt, _ in dealt} == {256}
    assert all(256 <= tokens < 768 for _, tokens in dealt)
    with pytest.raises(MeasurementFailed):
        ReportedCapacity.of({"armature_predicted_wait_seconds": 0.3}, 64)


def test_a_wait_below_a_step_counts_as_a_step() -> None:
    assert WaitSample(0.30, 0.20).error(0.02) == pytest.approx(0.5)
    assert WaitSample(0.02, 0.01).error(0.02) == pytest.approx(0.5)


def test_throughput_is_counted_while_all_clients_are_busy() -> None:
    def client(first: float, gap: float, number: int) -> list[StreamTiming]:
        pieces = tuple((first + gap * count, 2) for count in range(number))
        return [StreamTiming(0.0, pieces[:3]), StreamTiming(0.0, pieces[3:])]

    assert steady_throughput([client(1.0, 1.0, 10), client(4.0, 0.5, 20)]) == pytest.approx((6 * 2 + 12 * 2) / 6)
    with pytest.raises(MeasurementFailed):
        steady_throughput([client(1.0, 1.0, 5), client(9.0, 1.0, 5)])


class Truthful:
    """Makes 256 tokens a second of 32 clients, as it says, and waits 0.2 s for each first token, where it says 0.3."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def info(self) -> dict[str, object]:
        return {"plan": {"max_running_seqs": {"value": 4}, "max_model_len": {"value": 512}}}

    async def counters(self) -> dict[str, float]:
        return TOLD

    async def token_prompts(self, seed: int = 0) -> TokenPrompts:
        return TokenPrompts(range(100), seed)

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, on_piece: OnChunk | None = None
    ) -> StreamTiming:
        before = float(sum(self.asked)) / 32
        self.asked.append(max_tokens)
        await asyncio.sleep(0)
        return StreamTiming(before, tuple((before + 0.2 + count / 32, 1) for count in range(max_tokens)))


async def test_what_was_reported_is_held_against_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "ARRIVALS_PER_ROUND", 3)
    monkeypatch.setattr(wait, "LOAD_FRACTIONS", (100.0, 200.0))  # nobody has time for real loads
    told: list[str] = []
    server = Truthful()
    figures = await wait.capacity_and_wait(server, 2, told.append)  # type: ignore[arg-type]
    assert len(told) == 1 + 2 * 2
    assert len(server.asked) == 4 * wait.ANSWERS_PER_CLIENT + 2 * 2 * 3
    assert [figure.target for figure in figures] == [None, 0.15, 0.15, None, 0.25, None, 0.25]
    predicted = figures[-1]
    assert predicted.ratio == pytest.approx(0.5)
    assert predicted.met is False
    assert figures[-2].value == pytest.approx(200.0)
