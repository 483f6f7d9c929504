"""The processes that compile a client's grammar under limits, before the server does.

Each compilation is tried with a short limit first, and once more with a longer one in another process if it was too
short. So grammars that take long hold up one another and no ordinary ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any

from app.errors import ServiceStopping
from app.messages import GrammarSource
from app.text.template_messages import Reply
from app.text.template_process import ChildProcess, ProcessKind, TemplateLimits

# The largest grammars within the limits of a source take 0.2 s and 11 MB, the slowest of 1,587 public schemas 0.4 s.
QUICK_SECONDS = 0.25
SLOW_SECONDS = 1.5
_MEMORY_BYTES = 128 * 2**20
# One arena of memory and no traces: both would count as memory.
_KIND = ProcessKind(
    "The process for grammars",
    "app.text.grammar_sandbox",
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

        Raises:
            NotReady: The operating system could not start the process.
            ServiceStopping: `close` was called.
            WorkCancelled: The client has left.
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
