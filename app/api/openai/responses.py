"""OpenAI's response formats: stream events as chunks, and complete responses, for chat and text completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.api.streaming import CollectedChoice, CollectedCompletion, GenerationStream
from app.messages import ALL_LOGPROBS, FinishReason
from app.service.requests import Accepted, ChoiceFinished, PromptToken, ScoredToken, TextDelta, Usage
from app.text.tool_calls import ToolCallDelta
from app.version import VERSION

Json = dict[str, Any]
# OpenAI has no finish reason for a timeout. Like the end of the context, it is a limit that cut the text short.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "timeout": "length",
    "aborted": "stop",
    "tool_calls": "tool_calls",
}
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


@dataclass(frozen=True, slots=True)
class ShownTokens:
    """What a response shows of its tokens, by fields of vLLM.

    Attributes:
        ids: Token ids of the prompt and of each choice.
        names_ids: Log-probabilities name tokens by their ids, as `token_id:42`.
        prompt_logprobs: Number of the most likely tokens at each place of the prompt; None: its scores are not shown.
        named: Fields that the request names. Those that show nothing are null in the response.
    """

    ids: bool = False
    names_ids: bool = False
    prompt_logprobs: int | None = None
    named: frozenset[str] = frozenset()

    def null_ids(self) -> Json:
        """Return the prompt's token ids as null, if the request names them and does not want them."""
        return {"prompt_token_ids": None} if "return_token_ids" in self.named and not self.ids else {}

    def scored_prompt(self, prompt: Iterable[PromptToken]) -> Json:
        """Return the scores of the prompt, if the request names them."""
        if self.prompt_logprobs is not None:
            return {"prompt_logprobs": prompt_logprobs_body(prompt, self.prompt_logprobs)}
        return {"prompt_logprobs": None} if "prompt_logprobs" in self.named else {}


class ChatFormat:
    """Chat format: a first chunk with the role, then deltas; log-probabilities per token.

    `calls_functions`: the request has `functions`, the older form of tools. The text begins with `echoed`.
    """

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        shows_reasoning: bool = True,
        calls_functions: bool = False,
        shown: ShownTokens | None = None,
        echoed: str = "",
    ) -> None:
        self.shown = shown or ShownTokens()
        self._shows_reasoning, self._calls_functions, self._echoed = shows_reasoning, calls_functions, echoed

    def first(self, index: int) -> Json | None:
        """Return a choice's first chunk, with the role."""
        return _choice(index, delta={"role": "assistant", "content": self._echoed})

    def delta(self, event: TextDelta) -> Json:
        """Return the chunk of a text delta."""
        delta: Json = {}
        if event.text or not (event.reasoning or event.tool_calls):
            delta["content"] = event.text
        if event.reasoning and self._shows_reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls and self._calls_functions:
            delta["function_call"] = _call_delta(event.tool_calls[0])["function"]
        elif event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        return _choice(event.choice, delta=delta, logprobs=self._logprobs(event.logprobs))

    def finish(self, event: ChoiceFinished) -> Json:
        """Return the chunk with the finish reason."""
        return _choice(event.choice, delta={}, reason=self._reason(event.reason))

    def whole(self, choice: CollectedChoice) -> Json:
        """Return a choice of a complete response."""
        calls = [{"name": call.name, "arguments": call.arguments} for call in choice.tool_calls]
        text = self._echoed + choice.text
        content = text or None if calls else text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self._shows_reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls and self._calls_functions:
            message["function_call"] = calls[0]
        elif calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(choice.tool_calls, calls, strict=True)
            ]
        reason = self._reason(choice.reason)
        return _choice(choice.index, message=message, logprobs=self._logprobs(choice.logprobs), reason=reason)

    def _logprobs(self, tokens: Iterable[ScoredToken]) -> Json | None:
        return chat_logprobs(tokens, self.shown.names_ids)

    def _reason(self, reason: FinishReason) -> str:
        return "function_call" if reason == "tool_calls" and self._calls_functions else FINISH_REASONS[reason]


class CompletionFormat:
    """Completions format: plain text; log-probabilities in parallel lists, with each token's offset in the text.

    `echo_logprobs`: the lists begin with the prompt's tokens, each with so many of the most likely ones, and end with
    the stop token, if there is one: clients that score a text drop the last entry, which is the generated token.
    """

    object, chunk_object = "text_completion", "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        shown: ShownTokens | None = None,
        echo_logprobs: int | None = None,
    ) -> None:
        self.shown = shown or ShownTokens()
        self._echo_logprobs = echo_logprobs
        self._offsets: dict[int, int] = {}  # choice → characters sent so far

    def first(self, index: int) -> Json | None:
        """Return None: a completion has no first chunk before its text."""
        return None

    def delta(self, event: TextDelta) -> Json:
        """Return the chunk of a text delta."""
        logprobs = self._logprobs(event.choice, event.prompt, event.logprobs)
        return _choice(event.choice, text=event.text, logprobs=logprobs)

    def finish(self, event: ChoiceFinished) -> Json:
        """Return the chunk with the finish reason."""
        logprobs = self._logprobs(event.choice, (), self._stop_tokens(event))
        return _choice(event.choice, text="", logprobs=logprobs, reason=FINISH_REASONS[event.reason])

    def whole(self, choice: CollectedChoice) -> Json:
        """Return a choice of a complete response."""
        stop_tokens = () if choice.finished is None else self._stop_tokens(choice.finished)
        logprobs = self._logprobs(choice.index, choice.prompt, (*choice.logprobs, *stop_tokens))
        body = _choice(choice.index, text=choice.text, logprobs=logprobs, reason=FINISH_REASONS[choice.reason])
        return body | self.shown.scored_prompt(choice.prompt) | self.shown.null_ids()

    def _stop_tokens(self, event: ChoiceFinished) -> tuple[ScoredToken, ...]:
        return () if self._echo_logprobs is None or event.stop_token is None else (event.stop_token,)

    def _logprobs(self, index: int, prompt: Iterable[PromptToken], tokens: Iterable[ScoredToken]) -> Json | None:
        lists: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._echo_logprobs is not None:
            for token in prompt:
                self._append_token(lists, index, token, token.score, self._echo_logprobs)
        for scored in tokens:
            self._append_token(lists, index, scored, scored, len(scored.top))
        return lists if lists["tokens"] else None

    def _append_token(
        self, lists: Json, index: int, token: ScoredToken | PromptToken, score: ScoredToken | None, num_top: int
    ) -> None:
        """Append a token to the lists. Without a score, which the prompt's first token has not, its place has null."""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(token.text)
        lists["text_offset"].append(offset)
        lists["tokens"].append(name := _token_name(token, self.shown.names_ids))
        if score is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own = _finite_logprob(score.logprob)
        top: dict[str, float] = (
            {name: own} if self.shown.names_ids else {}
        )  # vLLM's clients take the first as the token
        # Parts of characters have the same text; the likeliest one stands for all.
        for other in _likeliest(score, num_top):
            top.setdefault(_token_name(other, self.shown.names_ids), _finite_logprob(other.logprob))
        lists["token_logprobs"].append(own)
        lists["top_logprobs"].append(top or {name: own})


OpenAIFormat = ChatFormat | CompletionFormat


def prompt_logprobs_body(tokens: Iterable[PromptToken], num_top: int) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then the scores of each token and the likeliest ones.

    Each has the token's id as its key.
    """
    return [None if token.score is None else _scores_by_id(token.score, token.rank, num_top) for token in tokens]


def _likeliest(score: ScoredToken, num_top: int) -> tuple[ScoredToken, ...]:
    return score.top if num_top == ALL_LOGPROBS else score.top[:num_top]


def _scores_by_id(score: ScoredToken, rank: int, num_top: int) -> Json:
    ranked = [(score, rank), *((other, place) for place, other in enumerate(_likeliest(score, num_top), 1))]
    scores: Json = {}
    for token, place in ranked:
        body = {"logprob": _finite_logprob(token.logprob), "rank": place, "decoded_token": token.text}
        scores.setdefault(str(token.token_id), body)
    return scores


async def chunks(
    stream: GenerationStream,
    format_: OpenAIFormat,
    metadata: ResponseMetadata,
    include_usage: bool,
    continuous_usage: bool = False,
    choices_each: int = 1,
) -> AsyncIterator[Json]:
    """Yield OpenAI's stream: per choice a first chunk, deltas and a finish.

    With `include_usage`, a last chunk has the usage and no choices; with `continuous_usage`, every chunk has the usage
    of its choice so far, and of that choice's prompt, as in vLLM. Each prompt has `choices_each` choices.
    """
    response_body: Callable[..., Json] = metadata.response_body
    more: Json = {"usage": None} if include_usage else {}
    counts = _ChoiceCounts(choices_each)
    usage = Usage(0)
    async for event in stream:
        if isinstance(event, Accepted):
            counts.prompts.append(event.prompt_token_ids)
            continue
        if event.choice not in counts.completions:
            if format_.shown.ids and (prompt := counts.first_prompt(event.choice)) is not None:
                more["prompt_token_ids"] = prompt
            so_far = counts.add(event.choice, 0)
            if continuous_usage:
                more["usage"] = usage_body(so_far)
            if first := format_.first(event.choice):
                yield response_body([first], **more)
                more.pop("prompt_token_ids", None)
        so_far, usage = counts.take(event), event.usage if isinstance(event, ChoiceFinished) else usage
        if continuous_usage:
            more["usage"] = usage_body(so_far)
        choice = _chunk_choice(event, format_)
        if choice is not None:
            yield response_body([choice], **more)
            more.pop("prompt_token_ids", None)
    if include_usage:
        yield response_body([], usage=usage_body(usage))


class _ChoiceCounts:
    """Tokens of each choice of a stream, and of its prompt."""

    def __init__(self, choices_each: int) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.completions: dict[int, int] = {}
        self._choices_each = choices_each

    def first_prompt(self, choice: int) -> tuple[int, ...] | None:
        """Return the prompt of a choice; None if another choice of this prompt has begun."""
        number = choice // self._choices_each
        begun = {other // self._choices_each for other in self.completions}
        return None if number in begun else self.prompts[number]

    def take(self, event: TextDelta | ChoiceFinished) -> Usage:
        """Count an event's tokens and return the usage of its choice."""
        if isinstance(event, ChoiceFinished):
            self.completions[event.choice] = event.num_completion_tokens
            return self.add(event.choice, 0)
        return self.add(event.choice, len(event.token_ids))

    def add(self, choice: int, count: int) -> Usage:
        """Add tokens to a choice and return its usage."""
        self.completions[choice] = self.completions.get(choice, 0) + count
        return Usage(len(self.prompts[choice // self._choices_each]), 0, self.completions[choice])


def _chunk_choice(event: TextDelta | ChoiceFinished, format_: OpenAIFormat) -> Json | None:
    """Return an event's part of a chunk; None if it has nothing to show."""
    if isinstance(event, ChoiceFinished):
        return format_.finish(event)
    if format_.shown.ids:
        return format_.delta(event) | {"token_ids": event.token_ids}
    shown = event.text or event.logprobs or event.reasoning or event.tool_calls
    return format_.delta(event) if shown else None


def complete_response(completion: CollectedCompletion, format_: OpenAIFormat, metadata: ResponseMetadata) -> Json:
    """Return the complete response object."""
    choices = [format_.whole(choice) for choice in completion.choices]
    more: Json = {}
    if isinstance(format_, ChatFormat):
        more = format_.shown.scored_prompt(completion.choices[0].prompt) | format_.shown.null_ids()
    if format_.shown.ids:
        more["prompt_token_ids"] = completion.prompt_token_ids[0]
        each = len(choices) // len(completion.prompt_token_ids)
        for place, (body, choice) in enumerate(zip(choices, completion.choices, strict=True)):
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": completion.prompt_token_ids[place // each]}
    return metadata.response_body(choices, usage=usage_body(completion.usage), **more)


def _choice(index: int, *, logprobs: Json | None = None, reason: str | None = None, **content: Any) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(tokens: Iterable[ScoredToken], names_ids: bool = False) -> Json | None:
    """Return the `logprobs` object of tokens in a chat, named by text or id; None if there are none."""
    content = [
        _logprob_body(token, names_ids) | {"top_logprobs": [_logprob_body(other, names_ids) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _token_name(token: ScoredToken | PromptToken, names_ids: bool) -> str:
    return f"token_id:{token.token_id}" if names_ids else token.text


def _logprob_body(token: ScoredToken, names_ids: bool) -> Json:
    return {
        "token": _token_name(token, names_ids),
        "logprob": _finite_logprob(token.logprob),
        "bytes": list(token.bytes),
    }


def _finite_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
