"""A step that waits, played through: worth much where a few clients ask again at once, and next to nothing is lost elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import median

import pytest

from app.engine.encoder.batching import BatchingDelay, TextSpan
from app.engine.encoder.engine import EncoderEngine, EncoderLimits
from app.hardware.step_times import StepTimeTable
from app.metrics.steps import StepTimeModel
from encoder_simulation import FakeRunner, encode

EACH, TOKENS, REQUESTS = 2e-5, 40, 600  # seconds of a token, tokens of a request


class TimedRunner(FakeRunner):
    """Steps take a fixed time and more for each token."""

    def __init__(self, fixed: float) -> None:
        super().__init__()
        self.fixed, self.now = fixed, 0.0

    def launch(self, spans: Sequence[TextSpan]) -> tuple[TextSpan, ...]:
        self.now += self.fixed + EACH * sum(span.num_tokens for span in spans)
        return super().launch(spans)


class Played:
    """Requests at their moments and the worker's waiting, on a clock of its own. `clients` ask again 0.2 to 0.6 ms after their answers."""

    def __init__(self, fixed: float, waits: bool, moments: Sequence[float] = (), clients: int = 0) -> None:
        table = StepTimeTable((), (), encode_points=tuple((tokens, fixed + EACH * tokens) for tokens in (16, 512)))
        self.runner, self.clients, self.source = TimedRunner(fixed), clients, random.Random(5)
        pace = BatchingDelay(512, StepTimeModel(table if waits else None))
        self.engine = EncoderEngine(self.runner, EncoderLimits(512, 256, ("embedding",)), pace, lambda: self.runner.now)
        self.coming = sorted(moments) or [1e-5 * number for number in range(clients)]
        self.came: list[float] = []
        self.latencies: list[float] = []
        while len(self.latencies) < REQUESTS:
            self._step()
        self.rate = len(self.latencies) / self.runner.now

    def _step(self) -> None:
        if not self.engine.has_work:
            self._until(max(self.runner.now, self.coming[0]))
        while (patience := self.engine.batching_delay_seconds) > 0.0:
            until = self.runner.now + patience
            self._until(min(until, max(self.coming[0], self.runner.now)) if self.coming else until)
        self._until(self.runner.now)
        for event in self.engine.step():
            self.latencies.append(self.runner.now - self.came[int(event.request_id)])
            if self.clients:
                heappush(self.coming, self.runner.now + self.source.uniform(2e-4, 6e-4))

    def _until(self, moment: float) -> None:
        self.runner.now = moment
        while self.coming and self.coming[0] <= moment:
            at = heappop(self.coming)
            self.engine.add(encode(str(len(self.came)), TOKENS, at=at))
            self.came.append(at)


@pytest.mark.parametrize(("fixed", "clients", "gain"), [(3e-3, 2, 1.3), (1e-2, 2, 1.5), (1e-2, 4, 1.4), (1e-2, 8, 1.2)])
def test_clients_who_ask_again_at_once_share_steps(fixed: float, clients: int, gain: float) -> None:
    waiting, without = (Played(fixed, waits, clients=clients) for waits in (True, False))
    assert waiting.rate >= gain * without.rate
    assert median(waiting.latencies) <= median(without.latencies)


@pytest.mark.parametrize(("fixed", "clients"), [(3e-4, 2), (1e-3, 8), (1e-2, 32), (1e-2, 1)])
def test_nothing_is_lost_where_a_step_costs_little_or_is_full_or_there_is_but_one(fixed: float, clients: int) -> None:
    waiting, without = (Played(fixed, waits, clients=clients) for waits in (True, False))
    assert waiting.rate >= 0.99 * without.rate


@pytest.mark.parametrize("fixed", [3e-4, 3e-3, 1e-2])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_unrelated_requests_lose_little(fixed: float, load: float) -> None:
    source, moments = random.Random(1), [0.0]
    while len(moments) < REQUESTS:
        moments.append(moments[-1] + source.expovariate(load * 512 / TOKENS / (fixed + 512 * EACH)))
    waiting, without = (Played(fixed, waits, moments) for waits in (True, False))
    assert waiting.rate >= 0.99 * without.rate
    assert median(waiting.latencies) <= 1.15 * median(without.latencies)
