"""Several engines of one model, each in a process of its own, as the service sees them: one worker.

Everything runs on the event loop, except what tells messages. A request goes to the engine with the least to do, where
the tokens of its prompt that an engine has computed lately count as done. If an engine ends, its requests get an error,
the others serve, and it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

from app.engine.scheduler.kv_allocator import block_hashes
from app.engine.worker import Callbacks, State
from app.errors import ArmatureError, NotReady, RequestError
from app.messages import Abort, Command, Encode, EngineRequest, Event, Generate, RequestFailed
from app.metrics.gauges import gauges_of_engines
from app.metrics.instruments import Metrics
from app.metrics.load_progress import LoadProgress
from app.metrics.step_monitor import StepRecorder
from app.metrics.steps import EngineSnapshot, StateUsage, StepStats
from app.server.engine_child import HostRecipe
from app.server.engine_clients import OpenRequests
from app.server.engine_host import EngineReady, HostMessage
from app.server.engine_process import EngineProcess

log = logging.getLogger(__name__)
# An open request counts as so many tokens of a prompt, whatever is left of its own: its decodes take time too. A shared
# prefix of 1,024 tokens is thus worth a wait behind eight more requests.
REQUEST_TOKENS = 128
MAX_BLOCKS = 65_536  # that are remembered of each engine: 4 million tokens

MakeRecipe = Callable[[int], HostRecipe]


class EngineLoad:
    """What one engine has to do, and the beginnings of the prompts that it was given, the least recently used first."""

    def __init__(self) -> None:
        self.requests = OpenRequests()
        self._tokens: dict[str, int] = {}  # to compute, of each open request
        self._blocks: dict[int, None] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self._tokens.values())

    def num_known(self, blocks: Sequence[tuple[int, int]]) -> int:
        """Return how many of a request's first tokens an earlier request here had too."""
        known = 0
        for end, block in blocks:
            if block not in self._blocks:
                break
            known = end
        return known

    def begin(self, request: EngineRequest, blocks: Sequence[tuple[int, int]]) -> None:
        self._tokens[request.request_id] = _num_tokens(request) - self.num_known(blocks) + REQUEST_TOKENS
        self.requests.note_command(request)
        for _, block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def note(self, seen: Event | Abort) -> None:
        """Note what may end a request."""
        if isinstance(seen, Abort):
            self.requests.note_command(seen)
        else:
            self.requests.note_event(seen)
        if seen.request_id not in self.requests.open:
            self._tokens.pop(seen.request_id, None)

    def lose(self) -> list[str]:
        """Forget everything, since the engine has ended, and return the ids of its open requests."""
        lost = list(self.requests.open)
        self.requests.open.clear()
        self._tokens.clear()
        self._blocks.clear()
        return lost


def prompt_blocks(request: EngineRequest) -> list[tuple[int, int]]:
    """Return the end and the hash of each block of a prompt; none for requests without one."""
    if not isinstance(request, Generate):
        return []
    scope = (request.adapter, request.cache_salt)
    return list(block_hashes(request.token_ids, len(request.token_ids), scope))


def _num_tokens(request: EngineRequest) -> int:
    if isinstance(request, Generate):
        return len(request.token_ids)
    return sum(len(text.token_ids) for text in request.texts) if isinstance(request, Encode) else 0


class EngineReplicas:
    """`number` engines as one worker. `make_recipe` is called with the number of the engine, `tell` as `EngineProcess` does.

    The first engine is loaded before the others, which then find its measurements and packed weights. The model is
    served once all are ready, and from then on as long as one is.
    """

    def __init__(
        self,
        number: int,
        make_recipe: MakeRecipe,
        tell: Callable[[HostMessage], None],
        recorder: StepRecorder,
        metrics: Metrics,
        name: str,
    ) -> None:
        self._tell = tell
        self._engines = [
            EngineProcess(
                self._recipe_of(make_recipe, place),
                self._message_handler(place),
                recorder,
                self._end_handler(place),
                f"{name} (engine {place})",
            )
            for place in range(number)
        ]
        self._loads = [EngineLoad() for _ in self._engines]
        self._lock = threading.Lock()
        self._unready = set(range(number))  # that were never ready
        self._has_ended: BaseException | None = None
        self._callbacks: Callbacks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.snapshot = EngineSnapshot()
        self._requests = metrics.counter(
            "engine_requests", "Requests that each of several engines was given.", "engine"
        )
        self._ends = metrics.counter("engine_ends", "Ends of each of several engines that nobody asked for.", "engine")
        metrics.gauges(lambda: gauges_of_engines([(one.state == "ready", one.snapshot) for one in self._engines]))

    @staticmethod
    def _recipe_of(make_recipe: MakeRecipe, place: int) -> Callable[[], HostRecipe]:
        return lambda: make_recipe(place)

    # ---- as the service sees it --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return any(engine.alive for engine in self._engines)

    @property
    def state(self) -> State:
        states = [engine.state for engine in self._engines]
        if self._has_ended is not None:
            return "failed"
        if states[0] == "stopped":
            return "stopped"
        return "ready" if not self._unready and "ready" in states else "loading"

    @property
    def _loading(self) -> EngineProcess:
        return next((each for each in self._engines if each.state != "ready"), self._engines[0])

    @property
    def stage(self) -> str:
        return "ready" if self.state == "ready" else self._loading.stage

    @property
    def load_progress(self) -> LoadProgress | None:
        return None if self.state == "ready" else self._loading.load_progress

    @property
    def pids(self) -> list[int | None]:
        return [engine.pid for engine in self._engines]

    def put(self, command: Command) -> None:
        """Send a request to one engine, what ends it to the same, and everything else to all."""
        if isinstance(command, EngineRequest):
            self._send(command)
        elif isinstance(command, Abort):
            for engine, load in zip(self._engines, self._loads, strict=True):
                if command.request_id in load.requests.open:
                    load.note(command)
                    engine.put(command)
        else:
            for engine in self._engines:
                engine.put(command)

    def _send(self, request: EngineRequest) -> None:
        ready = [place for place, engine in enumerate(self._engines) if engine.state == "ready"]
        if not ready:
            raise NotReady(f"No engine is ready: {self.stage}.")
        blocks = prompt_blocks(request)
        place = min(ready, key=lambda one: self._loads[one].num_tokens - self._loads[one].num_known(blocks))
        self._engines[place].put(request)
        self._loads[place].begin(request, blocks)
        self._requests.labels(str(place)).inc()

    def read_adapter(self, path: str, slot: int) -> None:
        raise AssertionError("the plan refuses adapters that clients load")

    # ---- its life ----------------------------------------------------------------------------------------------------

    def start(self, callbacks: Callbacks) -> None:
        self._callbacks, self._loop = callbacks, asyncio.get_running_loop()
        self._start_engine(0)

    def _start_engine(self, place: int) -> None:
        assert self._callbacks is not None, "it was started"
        take, engine = self._callbacks.on_output, self._engines[place]
        load = self._loads[place]

        def on_output(events: list[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
            for event in events:
                load.note(event)
            self.snapshot = merge_snapshots([each.snapshot for each in self._engines])
            take(events, self.snapshot, stats)

        def on_fatal(error: BaseException) -> None:
            self._take_failure(place, error)

        try:
            engine.start(Callbacks(on_output, on_fatal))
        except (ArmatureError, OSError) as error:  # its part of the machine is too small, or has no process left
            on_fatal(error)

    async def stop(self, timeout_seconds: float) -> None:
        await asyncio.gather(*(engine.stop(timeout_seconds) for engine in self._engines))

    def _message_handler(self, place: int) -> Callable[[HostMessage], None]:
        def tell(message: HostMessage) -> None:
            if not isinstance(message, EngineReady):
                if place == 0:
                    self._tell(message)
                return
            with self._lock:
                is_first = place in self._unready
                self._unready.discard(place)
                is_whole = not self._unready
            if is_first and place == 0 and len(self._engines) > 1:
                assert self._loop is not None, "it was started"
                self._loop.call_soon_threadsafe(self._start_others)
            if is_whole:
                self._tell(message)

        return tell

    def _start_others(self) -> None:
        for place in range(1, len(self._engines)):
            self._start_engine(place)

    def _end_handler(self, place: int) -> Callable[[RequestError], None]:
        def lose(error: RequestError) -> None:
            assert self._callbacks is not None, "it was started"
            self._ends.labels(str(place)).inc()
            events: list[Event] = [RequestFailed(each, error) for each in self._loads[place].lose()]
            self.snapshot = merge_snapshots([each.snapshot for each in self._engines])
            self._callbacks.on_output(events, self.snapshot, None)

        return lose

    def _take_failure(self, place: int, error: BaseException) -> None:
        """End the server at an engine that was never ready, or if no engine is left."""
        assert self._callbacks is not None, "it was started"
        if self._unready or not self.alive:
            self._has_ended = error
            self._callbacks.on_fatal(error)
        else:
            log.error(
                "engine %d is not started any more, and %d others serve: %s", place, len(self._engines) - 1, error
            )


def merge_snapshots(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Return the sums of several engines, with the queue of the one that has the fewest requests, which gets the next one."""
    nearest = min(snapshots, key=lambda one: one.num_running + one.num_waiting)
    states = [one.states for one in snapshots if one.states is not None]

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in snapshots)

    return replace(
        nearest,
        num_running=total("num_running"),
        num_waiting=total("num_waiting"),
        kv_used_tokens=total("kv_used_tokens"),
        kv_capacity_tokens=total("kv_capacity_tokens"),
        stepped_at=max(one.stepped_at for one in snapshots),
        states=StateUsage(*map(sum, zip(*map(astuple, states), strict=True))) if states else None,
    )
