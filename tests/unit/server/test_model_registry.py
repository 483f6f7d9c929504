"""The registry of several models with fake engines: any order of requests, loads, unloads and failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import NotReady, StepFailed
from app.hardware.plan.shares import MemoryWish
from app.server import models as module
from app.server.models import ModelRegistry
from app.server.prepare import prepare
from app.settings import Settings
from hypothesis_examples import examples
from tiny_encoders import write_encoder

NAMES = ("one", "two", "three")
ROOM = 25  # each model takes 10
PATIENCE = 20.0


class FakeServing:
    """A `ServerRuntime` that is ready after some turns of the loop. `doomed` has the names whose next load fails."""

    doomed: ClassVar[set[str]] = set()

    def __init__(self, start: Any, on_fatal: Any, on_ready: Any, tracer: Any, shared: Any, beside: Any) -> None:
        self.prepared_start, self._on_fatal = start, on_fatal
        self.name = start.settings.served_model_name[0]
        self.alive = False
        self.service = SimpleNamespace(ready=False, stage="loading", adapters=SimpleNamespace(find=lambda name: None))

    def runtime(self, keys: Any) -> Any:
        return module.ApiRuntime(self.service, None, None, dict, 0)  # type: ignore[arg-type]

    def runtime_among(self, process: Any) -> Any:
        return module.replace(process, service=self.service)

    async def start(self) -> None:
        self.alive = True
        asyncio.get_running_loop().call_later(0, self._end_loading)

    def _end_loading(self) -> None:
        if self.name in FakeServing.doomed:
            FakeServing.doomed.discard(self.name)
            self.fail()
        else:
            self.service.ready = self.alive

    def fail(self) -> None:
        self.alive = self.service.ready = False
        self._on_fatal(StepFailed("the device is gone"))

    async def stop(self) -> None:
        self.service.ready = False
        for _ in range(5):
            await asyncio.sleep(0)
        self.alive = False


@dataclass(frozen=True)
class Step:
    """What happens to a model, and after how many turns of the loop the next step begins."""

    what: str
    name: str
    turns: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["request", "request", "long request", "load", "unload", "crash", "doom", "keep 0", "leave"]),
        st.sampled_from(NAMES),
        st.integers(0, 6),
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("checkpoints") / "encoder")


@pytest.fixture
def registry_of(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    prepared = {
        name: prepare(Settings(model=encoder, served_model_name=(name,), load="on-demand", calibrate="off"))
        for name in NAMES
    }
    monkeypatch.setattr(module, "ServerRuntime", FakeServing)
    monkeypatch.setattr(module, "prepare_start", lambda given: prepared[given.served_model_name[0]])
    monkeypatch.setattr(module, "_wish", lambda start: None if start is None else MemoryWish("cpu", ROOM, 10, 10, 10))
    monkeypatch.setattr(module, "POLL_SECONDS", 0)
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0)
    monkeypatch.setattr(module.gc, "collect", lambda: None)

    def make() -> tuple[ModelRegistry, list[BaseException]]:
        fatal: list[BaseException] = []
        return ModelRegistry(Settings(), [each.settings for each in prepared.values()], fatal.append), fatal

    return make


async def use(registry: ModelRegistry, name: str, turns: int) -> str:
    """A request: it must have a ready engine, the same one, until it ends or its engine crashes."""
    entry = registry.find(name)
    assert entry is not None
    try:
        await registry.enter(entry)
    except NotReady:
        return "refused"
    try:
        serving = entry.serving
        for _ in range(turns):
            assert entry.state != "unloaded"
            if not serving.alive:  # its engine has crashed
                return "failed"
            assert entry.serving is serving
            await asyncio.sleep(0)
        return "served"
    finally:
        registry.leave(entry)


def act(registry: ModelRegistry, step: Step, tasks: list[asyncio.Task[Any]]) -> None:
    entry = registry.find(step.name)
    assert entry is not None
    match step.what:
        case "request" | "long request":
            tasks.append(asyncio.create_task(use(registry, step.name, 2 if step.what == "request" else 30)))
        case "load":
            tasks.append(asyncio.create_task(registry.load(entry)))
        case "unload":
            tasks.append(asyncio.create_task(registry.unload(entry)))
        case "crash" if entry.serving.alive:
            entry.serving.fail()  # type: ignore[attr-defined]
        case "doom":
            FakeServing.doomed.add(step.name)
        case "keep 0":
            registry.keep_alive(entry, 0)
        case "leave" if tasks:
            tasks[-1].cancel()


async def play(registry: ModelRegistry, fatal: list[BaseException], steps: list[Step]) -> None:
    FakeServing.doomed.clear()
    await registry.start()
    tasks: list[asyncio.Task[Any]] = []
    for step in steps:
        act(registry, step, tasks)
        for _ in range(step.turns):
            await asyncio.sleep(0)
            check(registry)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    expected = (NotReady, asyncio.CancelledError)
    assert not [one for one in results if isinstance(one, BaseException) and not isinstance(one, expected)]
    await check_all_can_be_used(registry, fatal)
    assert all(entry.num_open == entry.num_waiting == 0 for entry in registry.entries)
    await asyncio.wait_for(registry.stop(), PATIENCE)
    assert not registry.alive


async def check_all_can_be_used(registry: ModelRegistry, fatal: list[BaseException]) -> None:
    FakeServing.doomed.clear()
    for name in NAMES:
        while not fatal and await asyncio.wait_for(use(registry, name, 1), PATIENCE) == "refused":
            await asyncio.sleep(0)


def check(registry: ModelRegistry) -> None:
    assert sum(entry.taken.total for entry in registry.entries if entry.taken is not None) <= ROOM
    assert all(entry.num_open >= 0 for entry in registry.entries)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_requests_are_served_or_refused_in_any_order_of_events(registry_of: Any, steps: list[Step]) -> None:
    registry, fatal = registry_of()
    asyncio.run(play(registry, fatal, steps))


def test_a_fault_of_ours_leaves_no_model_loading_or_unloading(
    registry_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, fatal = registry_of()

    def fail_once(owner: Any, name: str) -> None:
        usual = getattr(owner, name)

        def fail(argument: Any) -> Any:
            monkeypatch.setattr(owner, name, usual)
            raise KeyError("a fault")

        monkeypatch.setattr(owner, name, fail)

    async def play_faults() -> None:
        await registry.start()
        entry = registry.find("one")
        assert entry is not None
        fail_once(module, "_wish")
        assert await use(registry, "one", 1) == "served"
        fail_once(registry, "_release")
        await registry.unload(entry)
        assert await use(registry, "one", 1) == "served"
        await registry.stop()

    asyncio.run(asyncio.wait_for(play_faults(), PATIENCE))
    assert not fatal
