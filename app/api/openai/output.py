"""OpenAI's response formats: stream events as chunks, and complete responses, for chat and text completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.api.openai.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    CompletionBody,
    FunctionCall,
    FunctionCallDelta,
    GeneratedObject,
    GenerationBody,
    MessageDelta,
    OpenAIFinishReason,
    OpenAITokenLogprob,
    OpenAIUsage,
    PromptLogprob,
    PromptLogprobs,
    ScoredChatToken,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    ToolCallDeltaBody,
)
from app.api.streaming import SLOT, CollectedChoice, CollectedCompletion, GenerationStream, write_directly
from app.messages import ALL_LOGPROBS, FinishReason
from app.service.requests import Accepted, ChoiceFinished, PromptToken, ScoredToken, TextDelta, Usage
from app.text.tool_calls import ToolCallDelta
from app.version import VERSION

# OpenAI has no finish reason for a timeout. Like the end of the context, it is a limit that cut the text short.
FINISH_REASONS: dict[FinishReason, OpenAIFinishReason] = {
    "stop": "stop",
    "length": "length",
    "timeout": "length",
    "aborted": "stop",
    "tool_calls": "tool_calls",
}
# JSON has no minus infinity; an impossible token gets this value.
LOWEST_LOGPROB = -9999.0
_FINGERPRINT = f"armature-{VERSION}"
ChoiceT = TypeVar("ChoiceT", ChatChunkChoice, TextChoice)
ChunkT = TypeVar("ChunkT", ChatCompletionChunk, TextCompletion)


@dataclass(frozen=True, slots=True)
class ShownTokens:
    """What a response shows of its tokens, by fields of vLLM.

    Attributes:
        ids: Token ids of the prompt and of each choice.
        names_ids: Log-probabilities name tokens by their ids, as `token_id:42`.
        prompt_logprobs: Number of the most likely tokens at each place of the prompt; None: its scores are not shown.
        named: Fields that the request names. Fields that show nothing are null in the response.
    """

    ids: bool = False
    names_ids: bool = False
    prompt_logprobs: int | None = None
    named: frozenset[str] = frozenset()

    def add_prompt(self, body: ChatCompletion | TextChoice, prompt: Iterable[PromptToken]) -> None:
        """Add the prompt's scores to a response, and null for what the request names and does not want."""
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_body(prompt, self.prompt_logprobs)
        elif "prompt_logprobs" in self.named:
            body["prompt_logprobs"] = None
        if "return_token_ids" in self.named and not self.ids:
            body["prompt_token_ids"] = None


def usage_body(usage: Usage) -> OpenAIUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class _OpenAIFormat(Generic[ChoiceT, ChunkT]):
    """What both formats share: the fields of every object, and the chunks of a stream.

    `metadata` is the id, the time of creation in Unix seconds, and the model's name.
    """

    def __init__(self, metadata: tuple[str, int, str], body: GenerationBody, shown: ShownTokens) -> None:
        self._id, self._created, self._model = metadata
        self._body, self._shown = body, shown

    def _first(self, index: int) -> ChoiceT | None:
        """Return a choice's first chunk, which comes before its text, if it has one."""
        return None

    def _delta(self, event: TextDelta) -> ChoiceT:
        raise NotImplementedError

    def _finish(self, event: ChoiceFinished) -> ChoiceT:
        raise NotImplementedError

    def _object(self, choices: list[ChoiceT]) -> ChunkT:
        raise NotImplementedError

    async def events(self, stream: GenerationStream) -> AsyncIterator[ChunkT]:
        """Yield OpenAI's stream: per choice a first chunk, deltas and a finish.

        With `include_usage`, a last chunk has the usage and no choices; with `continuous_usage`, every chunk has the
        usage of its choice so far, and of that choice's prompt, as in vLLM.
        """
        counts = _ChoiceCounts(self._body.n or 1)
        usage, prompt = Usage(0), None
        is_plain = not (self._shown.ids or self._body.continuous_usage)
        async for event in stream:
            if isinstance(event, Accepted):
                counts.prompts.append(event.prompt_token_ids)
                continue
            if event.choice not in counts.completions:
                if self._shown.ids and (first_of := counts.first_prompt(event.choice)) is not None:
                    prompt = first_of
                so_far = counts.add(event.choice, 0)
                if (first := self._first(event.choice)) is not None:
                    yield self._chunk(first, so_far, prompt)
                    prompt = None
            so_far = counts.take(event)
            if isinstance(event, ChoiceFinished):
                usage = event.usage
            if (choice := self._chunk_choice(event)) is not None:
                yield self._chunk(choice, so_far, prompt)
                prompt = None
            if is_plain and isinstance(event, TextDelta):
                write_directly(stream, self._chunk(self._delta(TextDelta(event.choice, SLOT)), so_far, None))
        if self._body.include_usage:
            last = self._object([])
            last["usage"] = usage_body(usage)
            yield last

    def _chunk(self, choice: ChoiceT, so_far: Usage, prompt: tuple[int, ...] | None) -> ChunkT:
        chunk = self._object([choice])
        if self._body.include_usage:
            chunk["usage"] = usage_body(so_far) if self._body.continuous_usage else None
        if prompt is not None:
            chunk["prompt_token_ids"] = list(prompt)
        return chunk

    def _chunk_choice(self, event: TextDelta | ChoiceFinished) -> ChoiceT | None:
        """Return an event's part of a chunk; None if it has nothing to show."""
        if isinstance(event, ChoiceFinished):
            return self._finish(event)
        if self._shown.ids:
            choice = self._delta(event)
            choice["token_ids"] = list(event.token_ids)
            return choice
        is_shown = event.text or event.logprobs or event.reasoning or event.tool_calls
        return self._delta(event) if is_shown else None


class ChatFormat(_OpenAIFormat[ChatChunkChoice, ChatCompletionChunk]):
    """Chat format: a first chunk with the role, then deltas; log-probabilities per token.

    `calls_functions`: the request has `functions`, the older form of tools. The text begins with `echoed`.
    """

    def __init__(
        self,
        metadata: tuple[str, int, str],
        body: GenerationBody,
        shown: ShownTokens,
        shows_reasoning: bool = True,
        calls_functions: bool = False,
        echoed: str = "",
    ) -> None:
        super().__init__(metadata, body, shown)
        self._shows_reasoning, self._calls_functions, self._echoed = shows_reasoning, calls_functions, echoed

    def _object(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }

    def _first(self, index: int) -> ChatChunkChoice:
        delta: MessageDelta = {"role": "assistant", "content": self._echoed}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, event: TextDelta) -> ChatChunkChoice:
        delta: MessageDelta = {}
        if event.text or not (event.reasoning or event.tool_calls):
            delta["content"] = event.text
        if event.reasoning and self._shows_reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls and self._calls_functions:
            delta["function_call"] = _call_delta(event.tool_calls[0])["function"]
        elif event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        logprobs = chat_logprobs(event.logprobs, self._shown.names_ids)
        return {"index": event.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _finish(self, event: ChoiceFinished) -> ChatChunkChoice:
        return {"index": event.choice, "delta": {}, "logprobs": None, "finish_reason": self._reason(event.reason)}

    def whole(self, completion: CollectedCompletion) -> ChatCompletion:
        body: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
            "choices": [self._choice(choice) for choice in completion.choices],
            "usage": usage_body(completion.usage),
        }
        self._shown.add_prompt(body, completion.choices[0].prompt)
        if self._shown.ids:
            _add_ids(body, body["choices"], completion)
        return body

    def _choice(self, choice: CollectedChoice) -> ChatChoice:
        calls: list[FunctionCall] = [{"name": call.name, "arguments": call.arguments} for call in choice.tool_calls]
        text = self._echoed + choice.text
        message: AssistantMessage = {
            "role": "assistant",
            "content": text or None if calls else text,
            "refusal": None,
        }
        if choice.reasoning and self._shows_reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls and self._calls_functions:
            message["function_call"] = calls[0]
        elif calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(choice.tool_calls, calls, strict=True)
            ]
        logprobs, reason = chat_logprobs(choice.logprobs, self._shown.names_ids), self._reason(choice.reason)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _reason(self, reason: FinishReason) -> OpenAIFinishReason:
        return "function_call" if reason == "tool_calls" and self._calls_functions else FINISH_REASONS[reason]


class CompletionFormat(_OpenAIFormat[TextChoice, TextCompletion]):
    """Completions format: plain text; log-probabilities in parallel lists, with each token's offset in the text.

    `echo_logprobs`: the lists begin with the prompt's tokens, each with so many of the most likely ones, and end with
    the stop token, if there is one: clients that score a text drop the last entry, which is the generated token. Of
    `num_generated` choices, a complete response has the best ones.
    """

    def __init__(
        self,
        metadata: tuple[str, int, str],
        body: CompletionBody,
        shown: ShownTokens,
        num_generated: int,
        echo_logprobs: int | None = None,
    ) -> None:
        super().__init__(metadata, body, shown)
        self._num_kept, self._num_generated, self._drops_logprobs = body.n or 1, num_generated, body.logprobs is None
        self._echo_logprobs = echo_logprobs
        self._offsets: dict[int, int] = {}  # choice → characters sent so far

    def _object(self, choices: list[TextChoice]) -> TextCompletion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }

    def _delta(self, event: TextDelta) -> TextChoice:
        logprobs = self._logprobs(event.choice, event.prompt, event.logprobs)
        return {"index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": None}

    def _finish(self, event: ChoiceFinished) -> TextChoice:
        logprobs = self._logprobs(event.choice, (), self._stop_tokens(event))
        return {"index": event.choice, "text": "", "logprobs": logprobs, "finish_reason": FINISH_REASONS[event.reason]}

    def whole(self, completion: CollectedCompletion) -> TextCompletion:
        if self._num_generated > self._num_kept:
            completion.keep_best(self._num_kept, self._num_generated, self._drops_logprobs)
        body = self._object([self._choice(choice) for choice in completion.choices])
        body["usage"] = usage_body(completion.usage)
        if self._shown.ids:
            _add_ids(body, body["choices"], completion)
        return body

    def _choice(self, choice: CollectedChoice) -> TextChoice:
        stop_tokens = () if choice.finished is None else self._stop_tokens(choice.finished)
        body: TextChoice = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.index, choice.prompt, (*choice.logprobs, *stop_tokens)),
            "finish_reason": FINISH_REASONS[choice.reason],
        }
        self._shown.add_prompt(body, choice.prompt)
        return body

    def _stop_tokens(self, event: ChoiceFinished) -> tuple[ScoredToken, ...]:
        return () if self._echo_logprobs is None or event.stop_token is None else (event.stop_token,)

    def _logprobs(
        self, index: int, prompt: Iterable[PromptToken], tokens: Iterable[ScoredToken]
    ) -> TextLogprobs | None:
        lists: TextLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if self._echo_logprobs is not None:
            for token in prompt:
                self._append_token(lists, index, token, token.score, self._echo_logprobs)
        for scored in tokens:
            self._append_token(lists, index, scored, scored, len(scored.top))
        return lists if lists["tokens"] else None

    def _append_token(
        self, lists: TextLogprobs, index: int, token: ScoredToken | PromptToken, score: ScoredToken | None, num_top: int
    ) -> None:
        """Append a token to the lists, with null in place of a score that the prompt's first token has not."""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(token.text)
        lists["text_offset"].append(offset)
        lists["tokens"].append(name := _token_name(token, self._shown.names_ids))
        if score is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own = _finite_logprob(score.logprob)
        # vLLM's clients take the first as the token.
        top: dict[str, float] = {name: own} if self._shown.names_ids else {}
        # Parts of characters have the same text; the likeliest one stands for all.
        for other in _likeliest(score, num_top):
            top.setdefault(_token_name(other, self._shown.names_ids), _finite_logprob(other.logprob))
        lists["token_logprobs"].append(own)
        lists["top_logprobs"].append(top or {name: own})


class _ChoiceCounts:
    """Tokens of each choice of a stream, and of its prompt. Each prompt has `choices_each` choices."""

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
        if isinstance(event, ChoiceFinished):
            self.completions[event.choice] = event.num_completion_tokens
            return self.add(event.choice, 0)
        return self.add(event.choice, len(event.token_ids))

    def add(self, choice: int, count: int) -> Usage:
        self.completions[choice] = self.completions.get(choice, 0) + count
        return Usage(len(self.prompts[choice // self._choices_each]), 0, self.completions[choice])


def _add_ids(
    body: GeneratedObject, choices: Sequence[ChatChoice | TextChoice], completion: CollectedCompletion
) -> None:
    prompts = completion.prompt_token_ids
    body["prompt_token_ids"] = list(prompts[0])
    each = len(choices) // len(prompts)
    for place, (choice, collected) in enumerate(zip(choices, completion.choices, strict=True)):
        choice["token_ids"] = collected.token_ids
        choice["prompt_token_ids"] = list(prompts[place // each])


# ---- scores of tokens ------------------------------------------------------------------------------------------------


def prompt_logprobs_body(tokens: Iterable[PromptToken], num_top: int) -> PromptLogprobs:
    """Return vLLM's `prompt_logprobs`: null for the first token, then by id each token's and the likeliest scores."""
    return [None if token.score is None else _scores_by_id(token.score, token.rank, num_top) for token in tokens]


def _likeliest(score: ScoredToken, num_top: int) -> tuple[ScoredToken, ...]:
    return score.top if num_top == ALL_LOGPROBS else score.top[:num_top]


def _scores_by_id(score: ScoredToken, rank: int, num_top: int) -> dict[str, PromptLogprob]:
    ranked = [(score, rank), *((other, place) for place, other in enumerate(_likeliest(score, num_top), 1))]
    scores: dict[str, PromptLogprob] = {}
    for token, place in ranked:
        body: PromptLogprob = {
            "logprob": _finite_logprob(token.logprob),
            "rank": place,
            "decoded_token": token.text,
        }
        scores.setdefault(str(token.token_id), body)
    return scores


def _call_delta(call: ToolCallDelta) -> ToolCallDeltaBody:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: FunctionCallDelta = {"name": call.name or "", "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(tokens: Iterable[ScoredToken], names_ids: bool = False) -> ChatLogprobs | None:
    """Return the `logprobs` object of tokens in a chat, named by text or id; None if there are none."""
    content: list[ScoredChatToken] = [
        {
            **_logprob_body(token, names_ids),
            "top_logprobs": [_logprob_body(other, names_ids) for other in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _token_name(token: ScoredToken | PromptToken, names_ids: bool) -> str:
    return f"token_id:{token.token_id}" if names_ids else token.text


def _logprob_body(token: ScoredToken, names_ids: bool) -> OpenAITokenLogprob:
    return {
        "token": _token_name(token, names_ids),
        "logprob": _finite_logprob(token.logprob),
        "bytes": list(token.bytes),
    }


def _finite_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
