"""Native dialect: generation from text or token ids to text and token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, NotRequired

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.errors import NATIVE_ERRORS
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.api.schemas import LEAVE_OUT, OPENAI_ONLY, OTHER_SAMPLERS, Int64, Refusal, SamplingFields, TokenIds, refused
from app.api.streaming import CollectedChoice, CollectedCompletion, EventEncoding, GenerationStream, respond
from app.errors import InvalidRequest
from app.messages import FinishReason
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, ScoredToken, Usage


class GenerateBody(SamplingFields):
    """Body of `POST /generate`, with `prompt` or `token_ids`.

    Without `max_tokens`, generation may continue to the end of the context. `add_special_tokens` applies to
    `prompt`: it makes the tokenizer add its own special tokens, such as the beginning of sequence. `model` may name an adapter.
    """

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "messages": "send prompt or token_ids here, or send messages to /v1/chat/completions.",
        "inputs": "send prompt or token_ids here.",
        "text": "send prompt or token_ids here.",
    }
    # vllm-router parses a body of this route as SGLang's and adds the first two.
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **OPENAI_ONLY,
        **refused(LEAVE_OUT, return_logprob=False, return_hidden_states=False, sampling_params=({},), parameters=({},)),
    }

    model: str | None = None
    prompt: str | None = None
    token_ids: TokenIds | None = None
    max_tokens: Int64 | None = None
    logprobs: Int64 | None = None
    beam_width: Int64 | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None


class GenerateUsage(TypedDict):
    """Tokens of a request; `cached_tokens` are those of the prompt that were read from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CandidateToken(TypedDict):
    """A token with its log-probability."""

    token_id: int
    text: str
    logprob: float


class SampledToken(CandidateToken):
    """A sampled token and the most likely ones at its position."""

    top: list[CandidateToken]


class GeneratedText(TypedDict):
    """One generated text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: NotRequired[list[SampledToken]]


class GeneratedChoice(GeneratedText):
    """One of several generated texts."""

    index: int


class GenerateResponse(GeneratedText):
    """Response of `POST /generate`: the first text, and `choices` with all texts if there are several."""

    usage: GenerateUsage
    choices: NotRequired[list[GeneratedChoice]]


class GenerateEvent(TypedDict):
    """Event of a streamed generation. The last one of a choice has the finish reason and the usage."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: NotRequired[list[SampledToken]]
    finish_reason: NotRequired[FinishReason]
    usage: NotRequired[GenerateUsage]


Json = dict[str, Any]
router = DialectRouter("Native")
_EVENTS = EventEncoding(NATIVE_ERRORS)


@router.post(
    "/generate",
    summary="Generate from text or token ids; returns text and token ids",
    response_model=GenerateResponse,
    responses=router.failures(*BODY_ERRORS, 404, 504) | router.event_stream(GenerateEvent),
    response_description="The generated text; with `stream`, its events.",
)
async def generate(request: Request, unread: RequestBody[GenerateBody]) -> Response:
    """Serve `POST /generate`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        body = await unread.parse()
        name = check_model(runtime, body.model)
        generation = _generation_request(body, name, request_id(request), sampling_defaults(runtime))
    return await respond(runtime.service.generate(generation), _NativeFormat(), _EVENTS, streams=body.stream)


def _generation_request(
    body: GenerateBody, name: str, identity: str, defaults: Mapping[str, float]
) -> GenerationRequest:
    if (body.prompt is None) == (body.token_ids is None):
        raise InvalidRequest("Send either prompt or token_ids.", field="prompt")
    return GenerationRequest(
        params=body.params(defaults, max_tokens=body.max_tokens, logprobs=body.logprobs, beam_width=body.beam_width),
        api="native",
        request_id=identity,
        prompt=body.prompt,
        token_ids=body.token_ids,
        add_special_tokens=body.add_special_tokens is not False,
        model=name,
        cache_salt=body.cache_salt,
    )


class _NativeFormat:
    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield an event for each text delta with its token ids, and one that ends each choice.

        The text of beams comes at once, after the search.
        """
        async for event in stream:
            if isinstance(event, Accepted):
                continue
            body: Json = {"index": event.choice, "text": "", "token_ids": []}
            if isinstance(event, ChoiceFinished):
                yield body | {"finish_reason": event.reason, "usage": _usage_body(event.usage)}
            else:
                body |= {"text": event.text, "token_ids": event.token_ids}
                yield body | {"logprobs": _logprob_list(event.logprobs)} if event.logprobs else body

    def whole(self, completion: CollectedCompletion) -> Json:
        """Return the body with the first choice's fields at the top level.

        If there are several choices, the body also has a list of all of them.
        """
        bodies = [_choice_body(choice) for choice in completion.choices]
        body = {name: value for name, value in bodies[0].items() if name != "index"} | {
            "usage": _usage_body(completion.usage)
        }
        return body if len(bodies) == 1 else body | {"choices": bodies}


def _choice_body(choice: CollectedChoice) -> Json:
    body: Json = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.reason,
    }
    return body | {"logprobs": _logprob_list(choice.logprobs)} if choice.logprobs else body


def _logprob_list(tokens: list[ScoredToken] | tuple[ScoredToken, ...]) -> list[Json]:
    return [_logprob_body(token) | {"top": [_logprob_body(other) for other in token.top]} for token in tokens]


def _logprob_body(token: ScoredToken) -> Json:
    return {"token_id": token.token_id, "text": token.text, "logprob": token.logprob}


def _usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
