"""A worker under test with everything that it says in queues."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from app.engine.worker import Callbacks, Engine, Worker
from app.messages import Event, Generate, SamplingParams
from app.metrics.steps import EngineSnapshot, StepStats
from engine_simulation import Simulation

PATIENCE_SECONDS = 10.0  # a hang becomes a red test


class Bench:
    """A worker under test, and queues of everything it said."""

    def __init__(self, build: Callable[[Callable[[str], None]], Engine] | None = None, fatal: bool = False) -> None:
        self.sim = Simulation()
        self.events: SimpleQueue[list[Event]] = SimpleQueue()
        self.steps: SimpleQueue[tuple[StepStats, EngineSnapshot]] = SimpleQueue()
        self.fatal: SimpleQueue[BaseException] = SimpleQueue()
        self.callbacks = Callbacks(
            on_output=self._hear,
            on_fatal=self.fatal.put,
            is_fatal=lambda error: fatal,
        )
        self.worker = Worker(build or (lambda report: self.sim.engine))

    def _hear(self, events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        if events:
            self.events.put(events)
        if stats is not None:
            self.steps.put((stats, snapshot))

    def start(self) -> None:
        self.worker.start(self.callbacks)

    def heard(self) -> list[Event]:
        return self.events.get(timeout=PATIENCE_SECONDS)

    def heard_until(self, number: int, kind: type[Event]) -> list[Event]:
        found: list[Event] = []
        while len(found) < number:
            found += [event for event in self.heard() if isinstance(event, kind)]
        return found

    def end(self) -> None:
        self.worker.join(PATIENCE_SECONDS)
        assert not self.worker.alive


def request(name: str, max_tokens: int = 3) -> Generate:
    return Generate(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1), 0.0)
