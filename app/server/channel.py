"""Messages over a stream socket between the processes of a server: those that serve HTTP, and engines.

Commands, events and the state of a step are encoded by msgspec. Rare messages (the plan, errors, lines of the log) are
pickled inside of one: both ends are programs of the same user and version, and the socket is a pair of which each has
one end, or lies in a directory of this user alone, so nobody else can send. A stream, and not packets: a tensor may be
larger than any packet, and one read takes several steps if the reader is late.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from app.errors import RequestError
from app.messages import Command, Event
from app.metrics.steps import Cause, EngineSnapshot, StepStats

_HEADER = struct.Struct("<Q")
READ_BYTES = 2**18


class Output(Struct, frozen=True, array_like=True, tag=True):
    """What a pass of the worker's loop made: its events, the state after it, and its step, if it had one.

    `ended_at` is the Unix time at which the step ended; `cause` says why it was slow.
    """

    events: list[Event]
    snapshot: EngineSnapshot
    stats: StepStats | None = None
    ended_at: float = 0.0
    cause: Cause | None = None


class ClientHello(Struct, frozen=True, array_like=True, tag=True):
    """The first message of an API process to an engine: its number, `of` all processes that serve."""

    number: int
    of: int


class Pickled(Struct, frozen=True, array_like=True, tag=True):
    """A rare message."""

    data: bytes

    @classmethod
    def of(cls, message: object) -> Pickled:
        return cls(pickle.dumps(message))

    def message(self) -> Any:
        return pickle.loads(self.data)  # from our own process, see above


def _encode_error(value: object) -> bytes:
    if isinstance(value, RequestError):
        return pickle.dumps(value.with_traceback(None))
    raise NotImplementedError(f"{type(value)} cannot be sent")


def _decode_error(kind: type, value: Any) -> Any:
    return pickle.loads(value)  # from our own process, see above


_ENCODER = Encoder(enc_hook=_encode_error)
_COMMANDS = Decoder(Command | Pickled | ClientHello, dec_hook=_decode_error)
_OUTPUTS = Decoder(Output | Pickled, dec_hook=_decode_error)


class Channel:
    """One end of a connection. Any thread may send, without ever waiting; one thread receives.

    What the socket does not take at once is sent by a thread. `is_engine`: this end is the engine's.
    """

    def __init__(self, connection: socket.socket, is_engine: bool) -> None:
        self._socket, self._decoder = connection, _COMMANDS if is_engine else _OUTPUTS
        self._received = bytearray()
        self._buffer = bytearray(READ_BYTES)  # `recv` would map as much new memory at each call
        self._changed = threading.Condition()
        self._unsent: deque[memoryview] = deque()
        self._is_closed = False
        self._writer = threading.Thread(target=self._write, name="armature-channel", daemon=True)
        self._writer.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Command | Output | Pickled | ClientHello) -> None:
        """Send a message, now or as soon as the other end has read enough. A closed connection drops it."""
        body = _ENCODER.encode(message)
        parts = [_HEADER.pack(len(body)), body]
        with self._changed:
            if self._is_closed:
                return
            if self._unsent:
                self._unsent.extend(memoryview(part) for part in parts)
                return
            try:
                num_sent = self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_sent = 0
            except OSError:  # the other end has ended; its reader finds out
                self._is_closed = True
                return
            for part in parts:
                if num_sent < len(part):
                    self._unsent.append(memoryview(part)[num_sent:])
                num_sent = max(num_sent - len(part), 0)
            if self._unsent:
                self._changed.notify_all()

    def receive(self, flags: int = 0) -> list[Any]:
        """Read once, and return the messages that are complete. Raises `EOFError` when the other end has ended."""
        try:
            num_read = self._socket.recv_into(self._buffer, 0, flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not num_read:
            raise EOFError
        received, decode, at = self._received, self._decoder.decode, 0
        received += memoryview(self._buffer)[:num_read]
        messages: list[Any] = []
        with memoryview(received) as view:
            while len(view) - at >= _HEADER.size:
                end = at + _HEADER.size + _HEADER.unpack_from(view, at)[0]
                if end > len(view):
                    break
                messages.append(decode(view[at + _HEADER.size : end]))
                at = end
        del received[:at]
        return messages

    def flush(self, timeout_seconds: float) -> None:
        """Wait until everything is sent, for limited time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent or self._is_closed, timeout_seconds)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that writes
        self._writer.join()
        self._socket.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                part = self._unsent[0]
            try:
                self._socket.sendall(part)
            except OSError:
                with self._changed:
                    self._is_closed = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._unsent.popleft()
                if not self._unsent:
                    self._changed.notify_all()
