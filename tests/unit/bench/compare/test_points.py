"""From the answers of an interval to a point, and the engine steps that belong to it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from armature_bench.compare import points
from armature_bench.compare import points as rhythm
from armature_bench.compare.environment import LoadConditions
from armature_bench.compare.points import ServerUnderTest, StepLogReader, build_point
from armature_bench.compare.result import LoadSpec, StepColumns
from armature_bench.http.client import StreamTiming
from armature_bench.http.dialects import TokenUsage
from armature_bench.http.embed import EmbedTiming
from armature_bench.http.infer import InferTiming
from armature_bench.http.loops import LoadRun
from armature_bench.http.tally import GenerateTiming
from armature_bench.http.wire import HttpResponse

BEGAN_AT = 1_790_000_000.0


def subject() -> ServerUnderTest:
    wire: Any = None
    return ServerUnderTest(
        wire, "tiny", StepLogReader(wire, BEGAN_AT), origin=100.0, local=True, seconds=4.0, idle_watts=3.0
    )


def stretch(answered: list[Any]) -> LoadRun[Any]:
    return LoadRun(started=110.0, ended=120.0, answered=answered)


def streamed(client: int, began: float, *pieces: tuple[float, int]) -> GenerateTiming:
    """Of a prompt of 10 tokens."""
    return GenerateTiming(
        began, client, 4, StreamTiming(began, pieces, TokenUsage(10, sum(count for _, count in pieces)))
    )


def test_generations_of_the_time_in_which_all_had_one() -> None:
    load = LoadSpec(kind="generate", clients=2, tokens=10, max_tokens=4)
    run = stretch(
        [
            streamed(0, 110.0, (111.0, 1), (112.0, 2), (114.0, 1)),
            streamed(1, 110.0, (112.0, 1), (113.0, 3)),
            streamed(1, 113.0, (114.0, 1), (120.0, 3)),
        ]
    )
    point = build_point(load, run, LoadConditions(watts=5.0, source="rapl"), StepColumns(), subject())
    # From the first request, at 110, with the prompts' time, to when the first client has nothing more to ask, at 114: 9 of 12 tokens.
    assert (point.began, point.seconds) == (10.0, 4.0)
    assert (point.generated_tokens, point.samples, point.read_tokens) == (9, 2.25, 22)
    assert point.tokens_per_second == 2.25
    assert point.request_seconds == [4.0, 3.0, 7.0]
    assert point.first_token_seconds == [1.0, 2.0, 1.0]
    assert point.tpot_seconds == [1.0, pytest.approx(1 / 3, abs=1e-6), 2.0]
    assert list(zip(point.gap_at, point.gap_seconds, strict=True)) == [
        (12.0, 1.0),
        (14.0, 2.0),
        (13.0, 1.0),
        (20.0, 6.0),
    ]
    assert point.energy is not None
    assert (point.energy.joules, point.energy.idle_watts) == (20.0, 3.0)


def test_where_clients_were_sent_away_all_counts() -> None:
    load = LoadSpec(kind="generate", clients=1, tokens=10, max_tokens=4)
    run = stretch([streamed(0, 110.0, (111.0, 1), (115.0, 3))])
    run.failures["status 429"] = 2
    point = build_point(load, run, LoadConditions(), StepColumns(), subject())
    assert (point.seconds, point.samples, point.generated_tokens, point.failures) == (5.0, 1.0, 4, {"status 429": 2})
    assert point.energy is None


@pytest.mark.parametrize(("clients", "max_tokens", "most"), [(1, 128, 78), (1, 0, 10_000), (32, 1000, 32)])
def test_a_load_ends_before_it_has_too_many_samples(clients: int, max_tokens: int, most: int) -> None:
    assert points._max_requests(LoadSpec(kind="generate", clients=clients, tokens=8, max_tokens=max_tokens)) == most


def test_texts_and_rows() -> None:
    texts = LoadSpec(kind="embed", clients=1, batch=4, tokens=8)
    run = stretch(
        [EmbedTiming(at, 0, at, at + 2.0, 4, 32, number) for at, number in ((110.0, 31), (112.0, None), (114.0, 33))]
    )
    point = build_point(texts, run, LoadConditions(), StepColumns(), subject())
    # From the first answer to the last: what the server does not count is as long as it was meant.
    assert (point.seconds, point.samples, point.read_tokens, point.generated_tokens) == (4.0, 8.0, 65, 0)
    assert point.request_seconds == [2.0, 2.0, 2.0]
    rows = LoadSpec(kind="infer", clients=1, batch=16, tokens=0)
    only = stretch([InferTiming(110.0, 0, 110.0, 112.5, 16)])
    point = build_point(rows, only, LoadConditions(), StepColumns(), subject())
    assert (point.seconds, point.samples, point.read_tokens) == (2.5, 16.0, 0)


class Told:
    """`/info/steps` of a server that made a step each second, `ahead` of this clock, and tells three at a time."""

    def __init__(self, count: int, ahead: float = 0.0) -> None:
        self.wire: Any = self
        self.count, self.ahead = count, ahead
        self.asked: list[int] = []

    async def get(self, path: str) -> HttpResponse:
        after = int(path.partition("after=")[2])
        self.asked.append(after)
        numbers = list(range(self.count))[after : after + 3]
        moments = [BEGAN_AT + self.ahead + number for number in numbers]
        columns = f'"at": {moments}, "seconds": {[0.5] * len(numbers)}, "tokens": {numbers}'
        words = f'"phase": {["decode"] * len(numbers)}, "cause": {[""] * len(numbers)}'.replace("'", '"')
        following = numbers[-1] + 1 if numbers else min(after, self.count)
        text = f'{{"next": {following}, "dropped": 1, "clock": {time.time() + self.ahead}, "steps": {{{columns}, {words}}}}}'
        return HttpResponse(200, {}, text.encode())


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -2.5])
async def test_steps_of_a_load_on_our_line_of_time(ahead: float) -> None:
    told: Any = Told(10, ahead)
    steps = StepLogReader(told, BEGAN_AT, _next=0)
    found = await steps.steps(3.9, 7.5)
    assert found.tokens == [4, 5, 6, 7]
    assert found.at == pytest.approx([4.0, 5.0, 6.0, 7.0], abs=0.05)
    assert told.asked == [0, 3, 6], "what comes later is asked for later"
    assert (await steps.steps(7.9, 8.5)).tokens == [8]


async def test_what_came_before_is_left_where_it_is() -> None:
    told: Any = Told(10)
    steps = StepLogReader(told, BEGAN_AT)
    await steps.begin()
    told.count = 12
    assert (await steps.steps(0.0, 100.0)).tokens == [10, 11]
    assert steps.num_lost_steps == 1


async def test_steps_beyond_what_is_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rhythm, "MAX_STEPS_PER_POINT", 4)
    told: Any = Told(6)
    steps = StepLogReader(told, BEGAN_AT, _next=0)
    assert len((await steps.steps(0.0, 100.0)).at) == 4
    assert steps.num_lost_steps == 2 + 2, "two too many, and one that the server said of each answer"
