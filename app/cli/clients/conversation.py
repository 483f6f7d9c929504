"""A conversation over OpenAI's chat route: its messages, its sampling parameters, and answers as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from app.cli.clients.connection import ServerConnection
from app.errors import SettingsInvalid

CHAT_PATH = "/v1/chat/completions"
SAMPLING: dict[str, Callable[[str], int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}


@dataclass(slots=True)
class Conversation:
    """The messages so far, without the system message, and what each request says."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    sampling: dict[str, int | float] = field(default_factory=dict)

    def set(self, name: str, text: str) -> None:
        """Set a sampling parameter; `off` leaves it to the server.

        Raises:
            SettingsInvalid: There is no such parameter, or it is no such number.
        """
        if name not in SAMPLING:
            raise SettingsInvalid(f"There is no parameter {name!r}. There are: {', '.join(SAMPLING)}.")
        if text == "off":
            self.sampling.pop(name, None)
            return
        try:
            self.sampling[name] = SAMPLING[name](text)
        except ValueError:
            kind = "a whole number" if SAMPLING[name] is int else "a number"
            raise SettingsInvalid(f"{name} is {kind} or off, not {text!r}.") from None

    def body(self, text: str) -> dict[str, Any]:
        """Return the request for the answer to one more message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *self.messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }

    def add(self, text: str, answer: str) -> None:
        """Add a message and its answer."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@dataclass(slots=True)
class StreamedAnswer:
    """An answer as far as it has arrived. Times are `time.monotonic` seconds, 0 before the first token."""

    text: str = ""
    num_events: int = 0  # with text; a step with accepted draft tokens gives several tokens in one
    completion_tokens: int | None = None  # the server's own count, at the end of a complete answer
    finish_reason: str = ""
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0

    def read(self, server: ServerConnection, body: dict[str, Any]) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of the answer's text as they arrive, and whether a part is reasoning.

        Raises:
            ServerRefused: No complete answer arrived.
        """
        with closing(server.events(CHAT_PATH, body)) as events:
            for event in events:
                self.completion_tokens = (event.get("usage") or {}).get("completion_tokens", self.completion_tokens)
                choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                text = delta.get("content") or ""
                if reasoning or text:
                    self._note_time()
                if reasoning:
                    yield reasoning, True
                if text:
                    self.text += text
                    yield text, False

    def _note_time(self) -> None:
        self.num_events += 1
        self.last = time.monotonic()
        self.first = self.first or self.last

    def describe(self) -> str:
        """Return the number of tokens, the tokens per second after the first, and the wait for the first."""
        if not self.first:
            return "no tokens"
        is_counted = self.completion_tokens is not None
        tokens = self.completion_tokens if self.completion_tokens is not None else self.num_events
        rate = (tokens - 1) / (self.last - self.first) if self.last > self.first else 0.0
        wait = self.first - self.began
        parts = [
            f"{'' if is_counted else 'about '}{tokens:,} {'token' if tokens == 1 else 'tokens'}",
            f"{rate:,.1f} tokens/s" if rate else "",
            f"first after {f'{wait:.2f} s' if wait >= 1 else f'{wait * 1e3:.0f} ms'}",
        ]
        return ", ".join(filter(None, parts))
