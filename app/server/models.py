"""Several models behind one address: which are loaded, and when each is loaded and unloaded.

Each model has a runtime of its own (`ServerRuntime`), which is made anew for each load. Everything runs on the main
process's event loop, and models are loaded one after the other, so that the measurement of one is not disturbed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app.api.access import ApiKeys
from app.api.routing import ApiRuntime, ModelState, ServedEntry
from app.errors import ArmatureError, NotReady, PlanImpossible, SettingsInvalid, StartupError
from app.hardware.decision import format_bytes
from app.hardware.facts import Facts
from app.hardware.plan.plan import make_plan
from app.hardware.plan.shares import MemoryWish, divide_memory, memory_wish
from app.hardware.probe.cgroup import find_cpu_stat
from app.hardware.probe.host_files import HostFiles
from app.hardware.probe.probe import probe
from app.metrics.gauges import DeploymentGauges, DeploymentInfo
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.power_monitor import PowerMonitor
from app.metrics.several_models import ProcessMetrics
from app.metrics.thermal_monitor import ThermalMonitor
from app.server.api_messages import PROCESS
from app.server.api_processes import ApiProcesses
from app.server.prepare import Prepared, UnfetchedModel, prepare_start
from app.server.start_console import StartConsole
from app.server.startup import FLUSH_SECONDS, ServerRuntime, SharedParts, read_api_keys, tasks_of, use_http_threads
from app.service.admission import OpenCounts
from app.settings import Settings, parse_adapters
from app.tracing.request_trace import Tracer
from app.weights.forms import RECIPES
from app.weights.hub.cache import HubName

log = logging.getLogger(__name__)
POLL_SECONDS = 0.01  # between two looks at a model that is loading, or at its last requests
LOOK_SECONDS = 1.0  # before the next look at a model that another process uses
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 300.0  # before a model that failed is loaded again; doubled each time
TAG = ":latest"  # Ollama's clients add it to a name without a tag
Start = Prepared | UnfetchedModel


class ModelEntry:
    """One of the models. `start` is what was prepared for the next load, None if it must be prepared anew."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name, *aliases = settings.served_model_name
        self._aliases = tuple(aliases)
        self.state: ModelState = "unloaded"
        self.reason = ""
        self.metrics = Metrics()
        self.start: Start | None = None
        self.tasks: frozenset[str] = frozenset()
        self.kind, self.max_model_len = "", 0
        self.runtime: ApiRuntime
        self.serving: ServerRuntime
        self.counts = OpenCounts()  # of all processes that serve
        self.num_waiting = 0
        self.expires_at: float | None = None
        unload_after = settings.unload_after_seconds
        self.usual_keep_seconds = None if unload_after == "never" else unload_after
        self.keep_seconds = self.usual_keep_seconds  # which a request may change until the next load
        self.share: int | None = None  # bytes
        self.taken: MemoryWish | None = None  # while it is loaded
        self.work: asyncio.Task[None] | None = None  # it loads or unloads
        self.began, self.load_seconds = 0.0, 0.0  # of the last load
        self.error: BaseException | None = None
        self.num_failures, self.retry_at = 0, 0.0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return self.counts.total(OpenCounts.ENTERED)

    @property
    def used_at(self) -> float:
        """When its last request began or ended in any process, by `time.monotonic`; or it was loaded."""
        return max(self.counts.each(OpenCounts.USED_AT)) / 1e9

    @property
    def names(self) -> Sequence[str]:
        adapters = (adapter.name for adapter in self.runtime.service.adapters)
        configured = (name for name, _ in parse_adapters(self.settings.lora))
        return list(dict.fromkeys((self.name, *self._aliases, *configured, *adapters)))

    @property
    def stage(self) -> str:
        if self.state in ("unloaded", "unloading"):
            return self.state
        if self.state == "ready":
            return self.serving.service.stage
        return self.reason or self.serving.service.stage


class ModelRegistry:
    """The models of a process. `common` are the settings that all have.

    `on_fatal` is called when no model can serve; `on_ready` from a worker thread, for each model. `processes` None: no
    other process serves.
    """

    def __init__(
        self,
        common: Settings,
        models: Sequence[Settings],
        on_fatal: Callable[[BaseException], None],
        on_ready: Callable[[Prepared, float, bool], None] = lambda prepared, seconds, has_chat: None,
        tracer: Tracer | None = None,
        processes: ApiProcesses | None = None,
    ) -> None:
        self._on_fatal, self._on_ready, self._tracer, self._processes = on_fatal, on_ready, tracer, processes
        self.entries = [ModelEntry(_in_own_process(settings)) for settings in models]
        if processes is not None:
            for number, entry in enumerate(self.entries):
                entry.counts = processes.counts.of_model(number, 0)
        self.may_control = common.model_control == "on"
        self.is_healthy, self._is_stopping = True, False
        facts = probe()
        self.metrics = ProcessMetrics(lambda: [entry.metrics for entry in self.entries])
        power = PowerMonitor(self.metrics, facts.power, lambda: self._is_idle, common.watts, common.hourly_price)
        self._power, self._thermal = power, ThermalMonitor(self.metrics, facts.thermal)
        place = DeploymentInfo(
            cpu_quota_cores=facts.cgroup.quota_cores,
            cpu_stat=find_cpu_stat(HostFiles(Path("/"))),
            hourly_price=common.hourly_price,
        )
        DeploymentGauges(self.metrics, lambda: place)
        self._owners: dict[str, ModelEntry] = {}
        self._find_names()
        self._prepare_all(facts)
        self._loading = asyncio.Lock()
        first = self.entries[0].serving.runtime(keys_of(models))
        self._process = replace(first, metrics=self.metrics, lifetime=self, models=self)
        for entry in self.entries:
            entry.runtime = entry.serving.runtime_among(self._process)

    def runtime(self) -> ApiRuntime:
        return self._process

    @property
    def reported_metrics(self) -> Mapping[int, Metrics]:
        return {PROCESS: self.metrics, **{number: entry.metrics for number, entry in enumerate(self.entries)}}

    def _find_names(self) -> None:
        """Raise `SettingsInvalid` if two models have a name in common."""
        for entry in self.entries:
            for name in (*entry.settings.served_model_name, *(name for name, _ in parse_adapters(entry.settings.lora))):
                other = self._owners.setdefault(name, entry)
                if other is not entry:
                    raise SettingsInvalid(f"The models {other.name} and {entry.name} are both called {name}.")

    def _prepare_all(self, facts: Facts) -> None:
        """Prepare each model and divide the memory. Raises the first error if no model can be prepared."""
        for entry in self.entries:
            try:
                entry.start = prepare_start(entry.settings)
            except SettingsInvalid:
                raise
            except StartupError as error:
                self._note_failure(entry, error)
            self._use(entry, entry.start or _unknown_start(entry.settings, facts))
        failures = [entry.error for entry in self.entries if entry.error is not None]
        if len(failures) == len(self.entries):
            raise failures[0]
        self._divide_memory()

    def _divide_memory(self) -> None:
        """Divide the memory among the models that are loaded at the start, and leave room for the largest other one."""
        wishes = {entry.name: wish for entry in self.entries if (wish := _wish(entry.start)) is not None}
        at_start = {entry.name for entry in self.entries if entry.settings.load == "start"}
        for device in {wish.device for wish in wishes.values()}:
            here = {name: wish for name, wish in wishes.items() if wish.device == device}
            later = max((wish.least for name, wish in here.items() if name not in at_start), default=0)
            available = min(wish.available for wish in here.values())
            first = {name: wish for name, wish in here.items() if name in at_start}
            shares = divide_memory(first, available - later)
            for entry in self.entries:
                entry.share = shares.get(entry.name, entry.share)
            if shares:
                parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shares.items())
                log.info("%s of memory are divided among the models: %s", format_bytes(available - later), parts)

    def _use(self, entry: ModelEntry, start: Start) -> None:
        """Give the model a new runtime, which does not run yet."""
        entry.metrics.forget_gauges()
        shared = SharedParts(entry.metrics, self._power, self._thermal)
        on_fatal = partial(self._worker_failed, entry)
        beside = None if self._processes is None else self._processes.beside(self.entries.index(entry))
        entry.serving = serving = ServerRuntime(start, on_fatal, self._on_ready, self._tracer, shared, beside)
        if isinstance(start, Prepared):
            entry.tasks, entry.kind = tasks_of(start), start.needs.kind
            entry.max_model_len = start.plan.memory.max_model_len
        if hasattr(self, "_process"):
            entry.runtime = serving.runtime_among(self._process)

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to load the models that are loaded at the start."""
        self._loop = asyncio.get_running_loop()
        use_http_threads(max(len(self.entries), 4))
        self._power.start()
        self._thermal.start()
        for entry in self.entries:
            if entry.settings.load == "start" and entry.state == "unloaded":
                self._begin_load(entry)

    async def stop(self) -> None:
        """Stop all models after responses were sent or cut off."""
        self._is_stopping = True
        self._power.stop()
        self._thermal.stop()
        for entry in self.entries:
            self._stop_timer(entry)
        works = [entry.work for entry in self.entries if entry.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await asyncio.gather(*(entry.serving.stop() for entry in self.entries if entry.serving.alive))
        if self._tracer is not None:  # last: responses that were cut off have ended now
            await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS)

    @property
    def alive(self) -> bool:
        """True while a worker runs."""
        return any(entry.serving.alive for entry in self.entries)

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        pending = any(entry.settings.load == "start" and entry.state == "loading" for entry in self.entries)
        return not pending and not self._is_stopping and any(self._can_serve(entry) for entry in self.entries)

    @property
    def _is_idle(self) -> bool:
        return not any(entry.num_open for entry in self.entries)

    def _can_serve(self, entry: ModelEntry) -> bool:
        return entry.state in ("ready", "unloading") or (entry.state == "unloaded" and entry.error is None)

    def find(self, name: str) -> ModelEntry | None:
        if (owner := self._owners.get(name) or self._owners.get(name.removesuffix(TAG))) is not None:
            return owner
        # An adapter that a client has loaded.
        found = (entry for entry in self.entries if entry.runtime.service.adapters.find(name) is not None)
        return next(found, None)

    async def enter(self, entry: ServedEntry) -> None:
        assert isinstance(entry, ModelEntry), "it is one of the entries"
        if entry.state != "ready":
            entry.num_waiting += 1  # it is not unloaded again before its first request
            try:
                await self._wait_until_ready(entry)
            finally:
                entry.num_waiting -= 1
                self._start_timer(entry)  # for a client that has left
        entry.counts.add(OpenCounts.ENTERED, 1)
        self._stop_timer(entry)

    def leave(self, entry: ServedEntry) -> None:
        assert isinstance(entry, ModelEntry), "it is one of the entries"
        entry.counts.add(OpenCounts.ENTERED, -1)
        entry.counts.note_use()
        if not entry.num_open:
            self._start_timer(entry)

    async def _wait_until_ready(self, entry: ModelEntry) -> None:
        deadline = time.monotonic() + entry.settings.request_timeout_seconds
        while entry.state != "ready":
            if self._is_stopping:
                raise NotReady("The server is stopping.")
            now = time.monotonic()
            if now > deadline:
                raise NotReady(f"The model {entry.name!r} was not loaded in time.")
            if entry.state == "failed" and now < entry.retry_at:
                raise NotReady(f"The model {entry.name!r} cannot be loaded: {entry.reason}", entry.retry_at - now)
            work = entry.work if entry.state in ("loading", "unloading") else self._begin_load(entry)
            assert work is not None, "a task loads or unloads it"
            expected = max(entry.began + entry.load_seconds - now, 0.0)
            if now + expected < deadline:
                await asyncio.wait({work}, timeout=deadline - now)
            if not work.done():
                raise NotReady(f"The model {entry.name!r} is still loading: {entry.stage}.", expected or None)

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        return self.metrics.render_models({entry.name: entry.metrics for entry in self.entries}, accept)

    # ---- loading and unloading ---------------------------------------------------------------------------------------

    async def load(self, entry: ServedEntry) -> None:
        assert isinstance(entry, ModelEntry), "it is one of the entries"
        entry.retry_at = 0.0
        await self._wait_until_ready(entry)

    async def unload(self, entry: ServedEntry) -> None:
        assert isinstance(entry, ModelEntry), "it is one of the entries"
        while entry.state == "loading" and entry.work is not None:
            await asyncio.wait({entry.work})
        work = entry.work if entry.state == "unloading" else self._begin_unload(entry)
        if work is not None:
            await asyncio.wait({work})

    def keep_alive(self, entry: ServedEntry, seconds: float | None) -> None:
        assert isinstance(entry, ModelEntry), "it is one of the entries"
        entry.keep_seconds = seconds
        entry.counts.note_use()
        self._start_timer(entry)

    def _stop_timer(self, entry: ModelEntry) -> None:
        entry.expires_at = None
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    def _start_timer(self, entry: ModelEntry) -> None:
        self._stop_timer(entry)
        is_used = entry.counts.own(OpenCounts.ENTERED) or entry.num_waiting
        if entry.keep_seconds is None or entry.state != "ready" or is_used or self._is_stopping:
            return
        self._set_timer(entry, max(entry.used_at + entry.keep_seconds - time.monotonic(), 0.0))

    def _set_timer(self, entry: ModelEntry, seconds: float) -> None:
        entry.expires_at = time.time() + seconds
        entry.timer = self._loop.call_later(seconds, self._unload_unused, entry)

    def _unload_unused(self, entry: ModelEntry) -> None:
        """Unload the model unless another process has used it meanwhile, which tells nobody."""
        assert entry.keep_seconds is not None, "the timer was started"
        left = entry.used_at + entry.keep_seconds - time.monotonic()
        if entry.num_open or left > 0:
            self._set_timer(entry, max(left, LOOK_SECONDS))
        else:
            self._begin_unload(entry)

    def _begin_load(self, entry: ModelEntry) -> asyncio.Task[None]:
        entry.state, entry.reason, entry.error = "loading", "another model is loading", None
        entry.began = time.monotonic()
        return self._begin(entry, self._load(entry, entry.work))

    def _begin(self, entry: ModelEntry, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        entry.work = task = self._loop.create_task(work, name=f"{entry.state} {entry.name}")
        task.add_done_callback(partial(self._check_work, entry))
        return task

    def _check_work(self, entry: ModelEntry, work: asyncio.Task[None]) -> None:
        """Let a fault of ours end the model and not leave it loading or unloading for ever."""
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("loading or unloading %s failed", entry.name, exc_info=error)
            if entry.state != "failed":
                self._begin(entry, self._fail(entry, error))
            else:
                self._try_later(entry, error)

    async def _load(self, entry: ModelEntry, before: asyncio.Task[None] | None) -> None:
        """Load a model once what was done with it `before` has ended."""
        try:
            if before is not None:
                await asyncio.wait({before})
            async with self._loading:
                entry.reason = "preparing"
                entry.began = time.monotonic()
                start: Start | None = entry.start
                entry.start = None  # the next load looks at the machine again
                if start is None:
                    start = await asyncio.to_thread(prepare_start, entry.settings)
                self._use(entry, await self._make_room(entry, await self._fetched(entry, start)))
                entry.reason = ""
                await entry.serving.start()
                while not entry.serving.service.ready and entry.error is None:
                    await asyncio.sleep(POLL_SECONDS)
        except (ArmatureError, OSError, RuntimeError, MemoryError) as error:
            await self._fail(entry, error)
            return
        if entry.error is not None:
            await self._fail(entry, entry.error)
            return
        entry.state, entry.load_seconds = "ready", time.monotonic() - entry.began
        entry.num_failures = 0
        entry.counts.note_use()
        entry.keep_seconds = entry.usual_keep_seconds
        self._start_timer(entry)

    async def _fetched(self, entry: ModelEntry, start: Start) -> Prepared:
        if isinstance(start, Prepared):
            return start

        def report(stage: str | LoadProgress) -> None:
            if self._is_stopping:
                raise NotReady("The server is stopping.")
            entry.reason = str(stage)
            console.show(stage)

        with closing(StartConsole(has_bars=entry.settings.log_format == "text")) as console:
            return await asyncio.to_thread(start.fetch, report)

    async def _make_room(self, entry: ModelEntry, start: Prepared) -> Prepared:
        """Plan with the memory that is left, after others were unloaded if need be. Raises `PlanImpossible`."""
        wish = _wish(start)
        assert wish is not None, "it is fetched"
        if entry.share is not None:
            start = await asyncio.to_thread(_planned_within, entry.settings, entry.share)
        else:
            left = self._left(entry, wish)
            while left < wish.least and (other := self._least_recently_used(entry, wish.device)) is not None:
                log.info("%s is unloaded, since %s needs its memory", other.name, entry.name)
                await self.unload(other)
                left = self._left(entry, wish)
            if left < wish.fixed:
                raise PlanImpossible(
                    f"{entry.name} needs {format_bytes(wish.fixed)}, and the other models leave {format_bytes(max(left, 0))} of"
                    f" {format_bytes(wish.available)}."
                )
            if left < wish.total:
                start = await asyncio.to_thread(_planned_within, entry.settings, left)
        entry.taken = _wish(start)
        return start

    def _left(self, entry: ModelEntry, wish: MemoryWish) -> int:
        others = [each.taken for each in self.entries if each is not entry and each.taken is not None]
        return wish.available - sum(each.total for each in others if each.device == wish.device)

    def _least_recently_used(self, entry: ModelEntry, device: str) -> ModelEntry | None:
        """Return the model to unload: one that is loaded on demand, of those without a request if there are any."""
        found = [
            each
            for each in self.entries
            if each is not entry
            and each.state == "ready"
            and each.settings.load == "on-demand"
            and each.taken is not None
            and each.taken.device == device
        ]
        return min(found, key=lambda each: (each.num_open > 0, each.used_at), default=None)

    def _begin_unload(self, entry: ModelEntry) -> asyncio.Task[None] | None:
        if entry.state != "ready":
            return None
        self._stop_timer(entry)
        entry.state, entry.reason = "unloading", ""
        return self._begin(entry, self._unload(entry))

    async def _unload(self, entry: ModelEntry) -> None:
        """Stop the model's worker once its open requests have ended, and release its memory."""
        if self._processes is not None:  # before it is seen whether they have requests
            self._processes.counts.set_open(self.entries.index(entry), False)
        await asyncio.sleep(0.0 if self._processes is None else POLL_SECONDS)
        while entry.num_open:
            await asyncio.sleep(POLL_SECONDS)
        await self._release(entry)
        entry.state = "unloaded"
        log.info("%s is unloaded", entry.name)

    async def _release(self, entry: ModelEntry) -> None:
        before = entry.serving
        if before.alive:
            await before.stop()
        self._use(entry, before.prepared_start)
        entry.taken = None
        del before
        gc.unfreeze()  # the loaded model's objects were frozen
        gc.collect()

    def _worker_failed(self, entry: ModelEntry, error: BaseException) -> None:
        """Note a failure, on the worker's thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._take_failure, entry, error)

    def _take_failure(self, entry: ModelEntry, error: BaseException) -> None:
        entry.error = error
        if entry.state == "ready":  # an unloading one ends all the same, and a loading one looks at the error
            self._begin(entry, self._fail(entry, error))

    async def _fail(self, entry: ModelEntry, error: BaseException) -> None:
        """Note that the model cannot serve, release it, and load it again later."""
        self._note_failure(entry, error)
        log.error("the model %s cannot serve: %s", entry.name, entry.reason, exc_info=None if entry.reason else error)
        await self._release(entry)
        self._try_later(entry, error)

    def _try_later(self, entry: ModelEntry, error: BaseException) -> None:
        """Load a model that has failed again later, and end the process if no other one can serve."""
        if not any(self._can_serve(each) or each.state == "loading" for each in self.entries):
            self.is_healthy = False
            self._on_fatal(error)
        elif entry.settings.load == "start" and not self._is_stopping:
            self._loop.call_later(entry.retry_at - time.monotonic(), self._retry, entry)

    def _note_failure(self, entry: ModelEntry, error: BaseException) -> None:
        entry.state, entry.error = "failed", error
        entry.reason = error.message if isinstance(error, ArmatureError) else f"{type(error).__name__}: {error}"
        wait = min(FIRST_RETRY_SECONDS * 2**entry.num_failures, LONGEST_RETRY_SECONDS)
        entry.num_failures, entry.retry_at = entry.num_failures + 1, time.monotonic() + wait

    def _retry(self, entry: ModelEntry) -> None:
        if entry.state == "failed" and not self._is_stopping:
            self._begin_load(entry)


def keys_of(models: Sequence[Settings]) -> ApiKeys:
    """Return the keys of all models, each with the models that it may use. Raises `SettingsInvalid`."""

    def read() -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for settings in models:
            name = settings.served_model_name[0]
            for key in read_api_keys(settings):
                found[key] = found.get(key, frozenset()) | {name}
        return found

    files = (settings.api_key_file for settings in models if settings.api_key_file is not None)
    keys = ApiKeys(read, *dict.fromkeys(files))
    open_to_all = next((each for each in models if not each.api_keys and each.api_key_file is None), None)
    if keys and open_to_all is not None:
        raise SettingsInvalid(
            f"The model {open_to_all.served_model_name[0]} has no API keys, and others have: give it some with api_keys"
            " or api_key_file in its table, or give keys for all models with --api-keys."
        )
    return keys


def _in_own_process(settings: Settings) -> Settings:
    """Let the engine compute in a process of its own: the kernels' threads serve one engine, and unloading frees all memory.

    Raises `SettingsInvalid` if it may not.
    """
    if settings.engine_process == "off":
        raise SettingsInvalid(
            "engine_process must not be off for several models, or one that is unloaded: each computes in a process."
        )
    return settings.model_copy(update={"engine_process": "on"})


def _wish(start: Start | None) -> MemoryWish | None:
    if not isinstance(start, Prepared):
        return None
    return memory_wish(start.facts, start.settings, start.plan, start.needs)


def _planned_within(settings: Settings, size: int) -> Prepared:
    """Prepare a start with so much memory. Raises `StartupError`."""
    limit = size if settings.memory_bytes == "auto" else min(size, settings.memory_bytes)
    start = prepare_start(settings.model_copy(update={"memory_bytes": limit}))
    assert isinstance(start, Prepared), "it is fetched"
    return start


def _unknown_start(settings: Settings, facts: Facts) -> UnfetchedModel:
    """Return what is known of a model that could not be prepared: its names."""
    plan = make_plan(facts, None, Settings(model=settings.model), None, RECIPES.keys())
    return UnfetchedModel(settings, facts, plan, HubName(str(settings.model)))
