"""Program of the process that compiles clients' grammars first. `text/grammar_process.py` starts and supervises it.

A few characters can ask for gigabytes and for hours: a large `multipleOf`, an `allOf` of patterns, nested repetitions.
The library has limits for the work of a step, none for that of its constructor, and its work in a thread cannot be
ended. The kernel's limits end a process. Compilation is deterministic, so what passes here is as cheap in the server.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.grammar_definition import LIMITS, STACK_BYTES, define
from app.text.process_limits import give_up_rights, limit_memory
from app.text.rust_panics import ConvertRustErrors
from app.text.template_messages import MEMORY_MESSAGE, Reply, ReplyStatus, receive_request, send_reply


def main() -> None:
    """Serve requests from standard input, which is a socket, until it is closed.

    The first request has the vocabulary and the limits, in bytes and CPU seconds. Each further request has a source of
    a grammar; the reply is its definition. All runs on a thread whose stack the recursion of large grammars fits.
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
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            request = receive_request(connection)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, start["render_seconds"])
        send_reply(connection, _compile(vocabulary, GrammarSource(**json.loads(request))))


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
        """Return the tokens of a text, which are its bytes."""
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
