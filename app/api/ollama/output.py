"""Ollama's response formats: lines of a stream, and complete responses."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from app.api.openai.responses import chat_logprobs
from app.api.streaming import CollectedCall, CollectedChoice, CollectedCompletion, GenerationStream
from app.messages import FinishReason
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta

Json = dict[str, Any]
# Ollama has no reason for a timeout. Like the end of the context, it is a limit that cut the text short.
_DONE_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "timeout": "length",
    "aborted": "stop",
    "tool_calls": "stop",
}


def timestamp(seconds: float) -> str:
    """Return a time in Unix seconds as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaFormat:
    """Formatter of one response. `is_chat`: the text is in a message."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model, self._is_chat, self._began = model, is_chat, time.monotonic()

    def loaded(self) -> Json:
        """Return the response to a request that only asks for the model to be loaded."""
        return self._line("") | {"done": True, "done_reason": "load"}

    def whole(self, completion: CollectedCompletion) -> Json:
        """Return the complete response."""
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        line = self._line(choice.text, choice.reasoning, _calls(choice.tool_calls))
        return line | _logprobs(choice.logprobs) | self._end(choice.finished)

    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield the stream's lines. Calls are whole, and the last line has the counts."""
        calls = CollectedChoice(0)
        async for event in stream:
            if isinstance(event, Accepted):
                continue
            if isinstance(event, TextDelta):
                calls.add(replace(event, text="", token_ids=(), logprobs=(), reasoning=""))
                if event.text or event.reasoning:
                    yield self._line(event.text, event.reasoning) | _logprobs(event.logprobs)
                continue
            if found := _calls(calls.tool_calls):
                yield self._line("", calls=found)
            yield self._line("") | self._end(event)

    def _line(self, text: str, reasoning: str = "", calls: list[Json] | None = None) -> Json:
        line: Json = {"model": self._model, "created_at": timestamp(time.time())}
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return line | {"response": text, **thinking, "done": False}
        message = {"role": "assistant", "content": text, **thinking}
        return line | {"message": message | {"tool_calls": calls} if calls else message, "done": False}

    def _end(self, finished: ChoiceFinished) -> Json:
        timings = finished.timings
        return {
            "done": True,
            "done_reason": _DONE_REASONS[finished.reason],
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": finished.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prefill_seconds),
            "eval_count": finished.usage.completion_tokens,
            "eval_duration": _nanoseconds(timings.decode_seconds),
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _logprobs(tokens: Iterable[ScoredToken]) -> Json:
    scored = chat_logprobs(tokens)
    return {} if scored is None else {"logprobs": scored["content"]}


def _calls(calls: list[CollectedCall]) -> list[Json]:
    """Return the calls with their arguments as objects. A call that a limit has cut short is left out."""
    bodies: list[Json] = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            function = {"index": len(bodies), "name": call.name, "arguments": arguments}
            bodies.append({"id": call.id, "function": function})
    return bodies
