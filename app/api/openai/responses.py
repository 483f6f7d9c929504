"""OpenAI's response formats: stream events as chunks, and complete responses, for chat and text completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.api.streaming import CollectedChoice, CollectedCompletion, GenerationStream
from app.messages import FinishReason
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta, Usage
from app.version import VERSION

Json = dict[str, Any]
# OpenAI has no finish reason for a timeout. Like the end of the context, it is a limit that cut the text short.
FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "timeout": "length", "aborted": "stop"}
# JSON has no minus infinity; an impossible token gets this value.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Fields that every chunk and response of one request repeats."""

    id: str
    object: str
    created: int
    model: str

    def response_body(self, choices: list[Json], **more: Any) -> Json:
        """Return a response object with these fields, the choices and further fields."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"armature-{VERSION}",
            "choices": choices,
            **more,
        }


def usage_body(usage: Usage) -> Json:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChatFormat:
    """Chat format: a first chunk with the role, then deltas; log-probabilities per token."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> Json | None:
        """Return a choice's first chunk, with the role."""
        return _choice(index, delta={"role": "assistant", "content": ""})

    def delta(self, event: TextDelta) -> Json:
        """Return the chunk of a text delta."""
        return _choice(event.choice, delta={"content": event.text}, logprobs=_chat_logprobs(event.logprobs))

    def finish(self, event: ChoiceFinished) -> Json:
        """Return the chunk with the finish reason."""
        return _choice(event.choice, delta={}, reason=event.reason)

    def whole(self, choice: CollectedChoice) -> Json:
        """Return a choice of a complete response."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _choice(choice.index, message=message, logprobs=_chat_logprobs(choice.logprobs), reason=choice.reason)


class CompletionFormat:
    """Completions format: plain text; log-probabilities in parallel lists, with each token's offset in the text."""

    object, chunk_object = "text_completion", "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}  # choice → characters sent so far

    def first(self, index: int) -> Json | None:
        """Return None: a completion has no first chunk before its text."""
        return None

    def delta(self, event: TextDelta) -> Json:
        """Return the chunk of a text delta."""
        return _choice(event.choice, text=event.text, logprobs=self._logprobs(event.choice, event.logprobs))

    def finish(self, event: ChoiceFinished) -> Json:
        """Return the chunk with the finish reason."""
        return _choice(event.choice, text="", reason=event.reason)

    def whole(self, choice: CollectedChoice) -> Json:
        """Return a choice of a complete response."""
        logprobs = self._logprobs(choice.index, choice.logprobs)
        return _choice(choice.index, text=choice.text, logprobs=logprobs, reason=choice.reason)

    def _logprobs(self, index: int, tokens: Iterable[ScoredToken]) -> Json | None:
        lists: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(token.text)
            lists["text_offset"].append(offset)
            lists["token_logprobs"].append(_finite_logprob(token.logprob))
            lists["tokens"].append(token.text)
            lists["top_logprobs"].append({other.text: _finite_logprob(other.logprob) for other in token.top})
        return lists if lists["tokens"] else None


OpenAIFormat = ChatFormat | CompletionFormat


async def chunks(
    stream: GenerationStream, format_: OpenAIFormat, metadata: ResponseMetadata, include_usage: bool
) -> AsyncIterator[Json]:
    """Yield OpenAI's stream: per choice a first chunk, deltas and a finish.

    With `include_usage`, a last chunk has the usage and no choices.
    """
    response_body: Callable[..., Json] = metadata.response_body
    more: Json = {"usage": None} if include_usage else {}
    started: set[int] = set()
    usage = Usage(0)
    async for event in stream:
        if isinstance(event, Accepted):
            continue
        if event.choice not in started:
            started.add(event.choice)
            if first := format_.first(event.choice):
                yield response_body([first], **more)
        if isinstance(event, ChoiceFinished):
            usage = event.usage
            yield response_body([format_.finish(event)], **more)
        elif event.text or event.logprobs:
            yield response_body([format_.delta(event)], **more)
    if include_usage:
        yield response_body([], usage=usage_body(usage))


def complete_response(completion: CollectedCompletion, format_: OpenAIFormat, metadata: ResponseMetadata) -> Json:
    """Return the complete response object."""
    return metadata.response_body(
        [format_.whole(choice) for choice in completion.choices], usage=usage_body(completion.usage)
    )


def _choice(index: int, *, logprobs: Json | None = None, reason: FinishReason | None = None, **content: Any) -> Json:
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": FINISH_REASONS[reason] if reason else None,
    }


def _chat_logprobs(tokens: Iterable[ScoredToken]) -> Json | None:
    content = [
        _logprob_body(token) | {"top_logprobs": [_logprob_body(other) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _logprob_body(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": _finite_logprob(token.logprob), "bytes": list(token.bytes)}


def _finite_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
