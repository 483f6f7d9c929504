"""The clients of an engine's process: the server's main process, and the API processes beside it.

Their commands are the worker's mailbox. The worker's thread reads the sockets itself, since a thread that reads for it
would cost a wake-up and a wait for the interpreter before each first token; another one reads while the worker loads.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

from app.messages import Abort, ArraysReady, Command, EngineRequest, Event, Generate, RequestFailed, SequenceFinished
from app.metrics.steps import Cause, EngineSnapshot, StepStats
from app.server.channel import Channel, ClientHello, Output, Pickled

# Longest time in which an API process without an event gets no state of the engine: an output for each step would wake it
# a thousand times a second.
STATE_SECONDS = 0.02


class OpenRequests:
    """The requests that an engine has of one client. `open` has the number of choices that have not ended, by id."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}

    def note_command(self, command: Command) -> None:
        if isinstance(command, Generate):
            self.open[command.request_id] = command.params.n
        elif isinstance(command, EngineRequest):
            self.open[command.request_id] = 1
        elif isinstance(command, Abort):
            self._end(command.request_id, is_whole=command.choice is None)

    def note_event(self, event: Event) -> None:
        if isinstance(event, SequenceFinished | ArraysReady | RequestFailed):
            self._end(event.request_id, is_whole=isinstance(event, RequestFailed))

    def _end(self, request_id: str, is_whole: bool) -> None:
        left = self.open.pop(request_id, 0) - 1
        if left > 0 and not is_whole:
            self.open[request_id] = left


class _ApiClient:
    """An API process. `place` is its number, and that of all processes; None before its first message."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.requests = channel, OpenRequests()
        self.place: tuple[int, int] | None = None
        self.told_at = 0.0


class EngineClients:
    """A mailbox for `Worker`, and `send` for its outputs. API processes connect to `listener`, if there is one."""

    def __init__(self, main: Channel, listener: socket.socket | None = None) -> None:
        self.main = main
        # Returns the command that the worker gets now; None if it was taken otherwise.
        self.take: Callable[[Any], Command | None] = lambda command: command
        self._commands: deque[Command] = deque()
        self._listener, self._others = listener, dict[int, _ApiClient]()  # by descriptor
        self._by_number: dict[int, _ApiClient] = {}
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._sources = [main.fileno(), self._woken.fileno()]
        if listener is not None:
            listener.setblocking(False)
            self._sources.append(listener.fileno())
        self._early: list[Any] = []  # what came with the recipe
        self._reading = threading.Lock()
        self._is_wanted_by_worker = self._is_read_by_worker = False

    # ---- as the worker's mailbox -------------------------------------------------------------------------------------

    def put(self, command: Command) -> None:
        """Add a command of this process; any thread may call it."""
        self._commands.append(command)
        self._wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        """Return the next command, on the worker's thread. Raises `queue.Empty` if there is none in time."""
        if not self._is_read_by_worker:
            self._take_over()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._commands:
            seconds = None if block else 0.0
            if block and deadline is not None:
                seconds = max(deadline - time.monotonic(), 0.0)
            if not self._read(seconds):
                raise Empty
        return self._commands.popleft()

    def empty(self) -> bool:
        if not self._is_read_by_worker:
            self._take_over()
        while not self._commands:
            if not self._read(0.0):
                return True
        return False

    # ---- reading -----------------------------------------------------------------------------------------------------

    def receive_recipe(self) -> Any:
        """Return what the server sends first. Commands may follow it at once."""
        messages: list[Any] = []
        while not messages:
            try:
                messages = self.main.receive()
            except EOFError:
                os._exit(1)
        recipe, *self._early = messages
        return recipe.message()

    def read_while_loading(self) -> None:
        """Read commands until the worker does so itself."""
        with self._reading:
            for message in self._early:
                self._queue(message)
            while not self._is_wanted_by_worker:
                self._read(None)

    def _take_over(self) -> None:
        self._is_wanted_by_worker = True
        self._wake()
        self._reading.acquire()
        self._is_read_by_worker = True

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is woken already
            self._waker.send(b"\0")

    def _read(self, seconds: float | None) -> bool:
        """Read what has come within so many seconds; False if nothing has."""
        # `epoll` and `poll` round up to milliseconds, and an encoder's engine waits for less.
        readable, _, _ = select.select(self._sources, (), (), seconds)
        for descriptor in readable:
            if descriptor == self.main.fileno():
                self._receive_from_main()
            elif descriptor == self._woken.fileno():
                self._woken.recv(4096)
            elif descriptor in self._others:
                self._receive(self._others[descriptor])
            else:
                self._accept()
        return bool(readable)

    def _receive_from_main(self) -> None:
        try:
            messages = self.main.receive(socket.MSG_DONTWAIT)
        except EOFError:
            os._exit(1)  # the server has ended
        for message in messages:
            self._queue(message)

    def _queue(self, message: Any) -> Command | None:
        command = self.take(message.message() if isinstance(message, Pickled) else message)
        if command is not None:
            self._commands.append(command)
        return command

    def _accept(self) -> None:
        assert self._listener is not None, "nothing else is readable"
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left already, or there is no descriptor left: it tries again
            return
        connection.setblocking(True)
        client = _ApiClient(Channel(connection, is_engine=True))
        self._others[client.channel.fileno()] = client
        self._sources.append(client.channel.fileno())

    def _receive(self, client: _ApiClient) -> None:
        try:
            messages = client.channel.receive(socket.MSG_DONTWAIT)
        except EOFError:
            self._lose(client)
            return
        for message in messages:
            if isinstance(message, ClientHello):
                client.place = message.number, message.of
                self._by_number = {**self._by_number, message.number: client}
            else:
                if not isinstance(message, Pickled):
                    client.requests.note_command(message)
                self._queue(message)

    def _lose(self, client: _ApiClient) -> None:
        """Abort the requests of an API process that has ended."""
        del self._others[client.channel.fileno()]
        self._sources.remove(client.channel.fileno())
        self._by_number = {number: each for number, each in self._by_number.items() if each is not client}
        self._commands.extend(Abort(request_id) for request_id in client.requests.open)
        client.channel.close()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        events: list[Event],
        snapshot: EngineSnapshot,
        stats: StepStats | None = None,
        ended_at: float = 0.0,
        cause: Cause | None = None,
    ) -> None:
        """Send each event to the process that has its request, the state to all, and the step to the main process."""
        if others := self._by_number:
            events = self._send_to(others, events, snapshot)
        self.main.send(Output(events, snapshot, stats, ended_at, cause))

    def _send_to(self, others: dict[int, _ApiClient], events: list[Event], snapshot: EngineSnapshot) -> list[Event]:
        """Send what the API processes get, and return the main process's events."""
        shares: dict[int, list[Event]] = {number: [] for number in (0, *others)}
        num_processes = next(iter(others.values())).place[1]  # type: ignore[index]  # it has said so
        for event in events:
            number = number_of_process(event.request_id, num_processes)
            if number in shares:  # otherwise its process has ended
                shares[number].append(event)
        now, is_idle = time.monotonic(), not (snapshot.num_running or snapshot.num_waiting)
        for number, client in others.items():
            if shares[number] or is_idle or now - client.told_at > STATE_SECONDS:
                client.told_at = now
                for event in shares[number]:
                    client.requests.note_event(event)
                client.channel.send(Output(shares[number], snapshot))
        return shares[0]


def number_of_process(request_id: str, num_processes: int) -> int:
    """Return the number of the API process that has made the id of a request; 0 is the main process."""
    return int(request_id.rpartition("#")[2]) % num_processes
