"""Pieces rendered as OpenAI's chunks, and whole answers as its objects; two shapes, chat and text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.api.fold import Choice, Whole
from app.api.streaming import Pieces
from app.generation import Accepted, ChoiceFinished, ScoredToken, TextDelta, Usage
from app.messages import FinishReason
from app.version import VERSION

Json = dict[str, Any]
# OpenAI has no word for a deadline: like the end of the context, it is a limit that cut the answer short.
FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "timeout": "length", "aborted": "stop"}
# JSON has no minus infinity; a token that cannot be is as good as this.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and answer of one request repeats."""

    id: str
    object: str
    created: int
    model: str

    def around(self, choices: list[Json], **more: Any) -> Json:
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
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChatShape:
    """Chat: a role first, then deltas; log-probabilities by token."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> Json | None:
        return _choice(index, delta={"role": "assistant", "content": ""})

    def delta(self, piece: TextDelta) -> Json:
        return _choice(piece.choice, delta={"content": piece.text}, logprobs=_chat_logprobs(piece.logprobs))

    def finish(self, piece: ChoiceFinished) -> Json:
        return _choice(piece.choice, delta={}, reason=piece.reason)

    def whole(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _choice(choice.index, message=message, logprobs=_chat_logprobs(choice.logprobs), reason=choice.reason)


class TextShape:
    """Completions: text as it comes; log-probabilities in parallel lists, with each token's offset in the text."""

    object, chunk_object = "text_completion", "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}  # choice → characters told so far

    def first(self, index: int) -> Json | None:
        return None

    def delta(self, piece: TextDelta) -> Json:
        return _choice(piece.choice, text=piece.text, logprobs=self._logprobs(piece.choice, piece.logprobs))

    def finish(self, piece: ChoiceFinished) -> Json:
        return _choice(piece.choice, text="", reason=piece.reason)

    def whole(self, choice: Choice) -> Json:
        logprobs = self._logprobs(choice.index, choice.logprobs)
        return _choice(choice.index, text=choice.text, logprobs=logprobs, reason=choice.reason)

    def _logprobs(self, index: int, tokens: Iterable[ScoredToken]) -> Json | None:
        lists: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(token.text)
            lists["text_offset"].append(offset)
            lists["token_logprobs"].append(_finite(token.logprob))
            lists["tokens"].append(token.text)
            lists["top_logprobs"].append({other.text: _finite(other.logprob) for other in token.top})
        return lists if lists["tokens"] else None


Shape = ChatShape | TextShape


async def chunks(pieces: Pieces, shape: Shape, envelope: Envelope, include_usage: bool) -> AsyncIterator[Json]:
    """OpenAI's stream: for each choice its first chunk, deltas and a finish; then, if asked for, the usage with no choices."""
    around: Callable[..., Json] = envelope.around
    more: Json = {"usage": None} if include_usage else {}
    begun: set[int] = set()
    usage = Usage(0)
    async for piece in pieces:
        if isinstance(piece, Accepted):
            continue
        if piece.choice not in begun:
            begun.add(piece.choice)
            if first := shape.first(piece.choice):
                yield around([first], **more)
        if isinstance(piece, ChoiceFinished):
            usage = piece.usage
            yield around([shape.finish(piece)], **more)
        elif piece.text or piece.logprobs:
            yield around([shape.delta(piece)], **more)
    if include_usage:
        yield around([], usage=usage_body(usage))


def whole_answer(whole: Whole, shape: Shape, envelope: Envelope) -> Json:
    return envelope.around([shape.whole(choice) for choice in whole.choices], usage=usage_body(whole.usage))


def _choice(index: int, *, logprobs: Json | None = None, reason: FinishReason | None = None, **content: Any) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": FINISH_REASONS[reason] if reason else None}


def _chat_logprobs(tokens: Iterable[ScoredToken]) -> Json | None:
    content = [_scored(token) | {"top_logprobs": [_scored(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None} if content else None


def _scored(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
