"""The arithmetic of the HTTP benches against a client of which every moment is known, and streams that cannot be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from armature_bench.console import Figure, MeasurementFailed
from armature_bench.http import latency, overhead
from armature_bench.http.client import OnChunk, StreamTiming, concurrent_tasks
from armature_bench.http.workload import TokenPrompts

LONG = 500
STEP = 0.010  # seconds of a step that only decodes
MIXED = 0.025  # and of one that carries prefill too
PREFILL_STEPS = 10


class ScriptedServer:
    """All streams get a token a step; `prefilling` counts the mixed steps that a long prompt still takes. Time is what it says."""

    def __init__(self, num_streams: int, pieces: int | None = None) -> None:
        self.now = 0.0
        self.prefilling = 0
        self.chunks = pieces  # after which a stream ends
        self.model_seconds = 0.0
        self._step = asyncio.Condition()
        self._waiting = 0
        self._num_streams = num_streams
        self.known: set[str] = set()  # pictures
        self.num_running = 0

    async def token_prompts(self, seed: int = 0) -> TokenPrompts:
        return TokenPrompts(range(100), seed)

    async def counters(self) -> dict[str, float]:
        return {'armature_model_seconds_total{phase="decode"}': self.model_seconds, "armature_other": 1.0}

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, on_piece: OnChunk | None = None
    ) -> StreamTiming:
        started = self.now
        if len(token_ids) == LONG:
            self.prefilling = PREFILL_STEPS
            while self.prefilling:
                await asyncio.sleep(0)
            return StreamTiming(started, ((self.now, 1),))
        pieces: list[tuple[float, int]] = []
        self.num_running += 1
        while len(pieces) < min(max_tokens, self.chunks or max_tokens):
            await self._next_step()
            pieces.append((self.now, 1))
            if on_piece is not None and not on_piece(len(pieces)):
                break
        self.num_running -= 1
        return StreamTiming(started, tuple(pieces))

    async def ask_about(self, picture: str, question: str, max_tokens: int) -> StreamTiming:
        started, steps = self.now, 1 if picture in self.known else PREFILL_STEPS
        self.known.add(picture)
        if not self.num_running:
            self.now += steps * MIXED
        self.prefilling = steps if self.num_running else 0
        while self.prefilling:
            await asyncio.sleep(0)
        return StreamTiming(started, ((self.now, 1),))

    async def _next_step(self) -> None:
        """The last stream to arrive makes the step."""
        async with self._step:
            self._waiting += 1
            if self._waiting < self._num_streams:
                await self._step.wait()
                return
            self._waiting = 0
            seconds = MIXED if self.prefilling else STEP
            self.now += seconds
            self.model_seconds += 0.9 * seconds
            self.prefilling = max(0, self.prefilling - 1)
            self._step.notify_all()
        await asyncio.sleep(0)


def scripted(monkeypatch: pytest.MonkeyPatch, num_streams: int, pieces: int | None = None) -> ScriptedServer:
    server = ScriptedServer(num_streams, pieces)
    clock = SimpleNamespace(perf_counter=lambda: server.now)
    monkeypatch.setattr(latency, "time", clock)
    monkeypatch.setattr(overhead, "time", clock)
    return server


def told(_: str) -> None:
    """Progress that nobody watches."""


def ratio_of(figures: Sequence[Figure]) -> float:
    ratio = figures[-1].ratio
    assert ratio is not None
    return ratio


async def test_gaps_while_a_prompt_prefills_are_held_against_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(monkeypatch, latency.NUM_STREAMS)
    figures = await latency.inter_token_latency(server, LONG, rounds=2, advance=told)
    assert figures[0].value == pytest.approx(STEP * 1e3)
    assert ratio_of(figures) == pytest.approx(MIXED / STEP)
    assert figures[-1].met


async def test_a_prefill_that_stalls_the_streams_misses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MIXED", 4 * STEP)
    server = scripted(monkeypatch, latency.NUM_STREAMS)
    figures = await latency.inter_token_latency(server, LONG, rounds=1, advance=told)
    assert ratio_of(figures) == pytest.approx(4.0)
    assert figures[-1].met is False


async def test_a_known_picture_and_streams_beside_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(monkeypatch, latency.NUM_STREAMS)
    first, second, quiet, beside = await latency.pictures(server, (4, 3), rounds=2, advance=told)
    assert first.value == pytest.approx(PREFILL_STEPS * MIXED * 1e3)
    assert second.ratio == pytest.approx(1 / PREFILL_STEPS) and second.met
    assert quiet.p99 == pytest.approx(STEP * 1e3)
    assert beside.ratio == pytest.approx(MIXED / STEP) and beside.met is False
    assert len(server.known) == 1 + 2 * (1 + latency.NUM_PICTURES), "each picture is a new one"


async def test_streams_that_end_early_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(monkeypatch, latency.NUM_STREAMS, pieces=5)
    with pytest.raises(MeasurementFailed, match="5 chunks"):
        await latency.inter_token_latency(server, LONG, rounds=1, advance=told)
    server = scripted(monkeypatch, overhead.NUM_STREAMS, pieces=5)
    with pytest.raises(MeasurementFailed, match="had 5"):
        await overhead.overhead_outside_model(server, rounds=1, advance=told)


async def test_what_is_not_the_models_time_is_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(monkeypatch, overhead.NUM_STREAMS)
    figures = await overhead.overhead_outside_model(server, rounds=1, advance=told)
    assert ratio_of(figures) == pytest.approx(0.1)
    assert figures[0].value == pytest.approx(overhead.NUM_STREAMS / STEP)


async def test_a_server_without_the_counter_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(monkeypatch, overhead.NUM_STREAMS)
    monkeypatch.setattr(overhead, "MODEL_SECONDS", "armature_elsewhere")
    with pytest.raises(MeasurementFailed, match="no armature_elsewhere"):
        await overhead.overhead_outside_model(server, rounds=1, advance=told)


async def test_the_first_failure_is_raised_as_it_is_and_ends_the_others() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        raise MeasurementFailed("early")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(MeasurementFailed, match="early"):
        async with concurrent_tasks() as tasks:
            tasks.create_task(wait())
            tasks.create_task(fail())
    assert ended.is_set()


def test_gaps_are_those_between_two_moments() -> None:
    stream = StreamTiming(0.0, ((1.0, 1), (2.0, 1), (4.0, 1), (7.0, 1)))
    assert stream.gaps() == [1.0, 2.0, 3.0]
    assert stream.gaps(until=4.0) == [1.0, 2.0]
    assert stream.gaps(since=2.0, until=4.0) == [2.0]
    assert (stream.time_to_first_token, stream.num_tokens) == (1.0, 4)
