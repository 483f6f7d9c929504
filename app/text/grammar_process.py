"""The process that compiles a client's grammar under limits, before the server does: its program, and its supervision.

A few characters can ask for gigabytes and for hours: a large `multipleOf`, an `allOf` of patterns, nested repetitions.
The library has limits for the work of a step, none for that of its constructor, and its work in a thread cannot be
ended. The kernel's limits end a process. Compilation is deterministic, so what passes here is as cheap in the server.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from app.errors import InvalidRequest, ServiceStopping
from app.messages import GrammarSource
from app.text.child_process import (
    MEMORY_MESSAGE,
    ChildProcess,
    ConvertRustErrors,
    ProcessKind,
    Reply,
    ReplyStatus,
    TemplateLimits,
    give_up_rights,
    limit_memory,
    receive_request,
    send_reply,
    serve_requests,
)
from app.text.grammar_definition import LIMITS, STACK_BYTES, define

# The largest grammars within the limits of a source take 0.2 s and 11 MB, the slowest of 1,587 public schemas 0.4 s.
QUICK_SECONDS = 0.25
SLOW_SECONDS = 1.5
_MEMORY_BYTES = 128 * 2**20
# One arena of memory and no traces: both would count as memory.
_KIND = ProcessKind(
    "The process for grammars",
    "app.text.grammar_process",
    ("app", "llguidance"),
    {"MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"},
)


class GrammarProcess:
    """One process; it is started at the first use, kept, and started again after it was ended."""

    def __init__(self, vocabulary: Mapping[str, Any], cpu_seconds: float) -> None:
        self._vocabulary = vocabulary
        self._limits = TemplateLimits(cpu_seconds, _MEMORY_BYTES)
        self._lock = Lock()
        self._child: ChildProcess | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        with self._lock:
            self._running()

    def compile(self, source: GrammarSource) -> Reply:
        """Return the definition of a grammar that can be compiled within the limits, or why there is none.

        Raises `NotReady` if the process could not be started, `ServiceStopping` after `close`, and `WorkCancelled` if
        the client has left.
        """
        with self._lock:
            child = self._running()
            reply = child.compiled()
            if not child.ended:
                reply = child.ask(json.dumps(asdict(source)).encode(), can_be_cancelled=True)
            if self._closed:
                raise ServiceStopping("The server is stopping.")
            return reply

    def close(self) -> None:
        """End the process, and with it a compilation that another thread waits for."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def _running(self) -> ChildProcess:
        if self._closed:
            raise ServiceStopping("The server is stopping.")
        if self._child is None or self._child.ended:
            self._child = ChildProcess(_KIND, self._limits, self._vocabulary)
        return self._child


def main() -> None:
    """Serve requests from standard input, which is a socket, until it is closed.

    The first request has the vocabulary and the limits, in bytes and CPU seconds. Each further request has a source;
    the reply is its definition. All runs on a thread with a stack that the recursion of large grammars fits.
    """
    begun = threading.Event()
    connection = socket.socket(fileno=0)
    start = json.loads(receive_request(connection))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(connection, start, begun))
    thread.start()
    begun.wait()
    limit_memory(start["memory_bytes"])
    give_up_rights()
    signal.setitimer(signal.ITIMER_PROF, 0)
    send_reply(connection, (ReplyStatus.TEXT, ""))
    thread.join()


def _serve(connection: socket.socket, start: dict[str, Any], begun: threading.Event) -> None:
    vocabulary = LLTokenizer(TokenizerWrapper(_BareVocabulary(start["vocab_size"], start["special"])), slices=[])
    _compile(vocabulary, GrammarSource("json_schema", "{}", ""))  # loads what is loaded at the first use
    begun.set()
    serve_requests(
        connection,
        start["render_seconds"],
        lambda request: _compile(vocabulary, GrammarSource(**json.loads(request))),
    )


class _BareVocabulary:
    """The bytes and the special tokens of a vocabulary: a grammar costs the same with them, and they are few."""

    def __init__(self, vocab_size: int, special: Sequence[tuple[int, str]]) -> None:
        by_id = {token_id: b"\xff" + name.encode() for token_id, name in special}
        free = (token_id for token_id in range(vocab_size + 256) if token_id not in by_id)
        self._ids = [next(free) for _ in range(256)]
        by_id |= {token_id: bytes([byte]) for byte, token_id in enumerate(self._ids)}
        size = max(vocab_size, *by_id) + 1
        self.tokens = [by_id.get(token_id, b"") for token_id in range(size)]
        self.special_token_ids = [token_id for token_id, _ in special]
        self.eos_token_id = self.special_token_ids[0] if special else size - 1
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def _compile(vocabulary: LLTokenizer, source: GrammarSource) -> Reply:
    try:
        with ConvertRustErrors(InvalidRequest, f"{source.field} cannot be followed"):
            definition = define(source)
            matcher = LLMatcher(vocabulary, definition, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                return ReplyStatus.FAILED, matcher.get_error()
    except MemoryError:
        return ReplyStatus.MEMORY, MEMORY_MESSAGE
    except InvalidRequest as error:
        return ReplyStatus.REFUSED, error.message
    return ReplyStatus.TEXT, definition
