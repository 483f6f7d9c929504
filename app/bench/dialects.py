"""The three API dialects of a streamed answer: native `/generate`, and OpenAI's completions and chat completions.

Most servers implement at least one of the OpenAI dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy generation request. `prompt` is token ids if client and server support them, else text."""

    prompt: str | list[int]
    max_tokens: int
    ignore_eos: bool = True
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt and completion tokens as counted by the server."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """Request and response format of one dialect.

    `num_tokens` returns the number of tokens whose text an event carries, as far as the event shows it; 0 for other
    events.
    """

    path: str
    takes_ids: bool
    body: Callable[[Ask], Json]
    num_tokens: Callable[[Json], int]


def usage_of(event: Json) -> Usage | None:
    """Return the usage that an event reports, or None. All three dialects report it under `usage` in a late event."""
    usage = event.get("usage")
    if not usage or usage.get("completion_tokens") is None:
        return None
    return Usage(usage.get("prompt_tokens") or 0, usage["completion_tokens"])


def _native_body(ask: Ask) -> Json:
    prompt = {"prompt": ask.prompt} if isinstance(ask.prompt, str) else {"token_ids": ask.prompt}
    return {**prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": ask.ignore_eos, "stream": True}


def _openai_body(ask: Ask) -> Json:
    body: Json = {"max_tokens": ask.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if ask.ignore_eos:
        body["ignore_eos"] = True  # not an OpenAI field; vLLM, llama.cpp and Armature support it
    return body | ({"model": ask.model} if ask.model else {})


def _completions_body(ask: Ask) -> Json:
    return _openai_body(ask) | {"prompt": ask.prompt}


def _chat_body(ask: Ask) -> Json:
    return _openai_body(ask) | {"messages": [{"role": "user", "content": ask.prompt}]}


def _choice(event: Json) -> Json:
    choices = event.get("choices")
    return choices[0] if choices else {}


def _spoken(event: Json) -> int:
    delta = _choice(event).get("delta") or {}
    return 1 if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") else 0


DIALECTS: Mapping[str, Dialect] = {
    "native": Dialect("/generate", True, _native_body, lambda event: len(event.get("token_ids") or ())),
    "completions": Dialect("/v1/completions", True, _completions_body, lambda event: 1 if _choice(event).get("text") else 0),
    "openai": Dialect("/v1/chat/completions", False, _chat_body, _spoken),
}
