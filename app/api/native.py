"""Native dialect: generation from text or token ids to text and token ids, and the tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.dependencies import counting_refusals, read_body, request_id, runtime_of
from app.api.fold import Choice, Whole, fold, server_timing
from app.api.native_schemas import DetokenizeBody, GenerateBody, TokenizeBody
from app.api.openai import template_message
from app.api.streaming import EventStream, Pieces, encode, opened
from app.errors import InvalidRequest
from app.generation import Accepted, ChoiceFinished, GenerationRequest, ScoredToken, Usage

Json = dict[str, Any]


async def generate(request: Request) -> Response:
    """Serve `POST /generate`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "native"):
        body = await read_body(request, GenerateBody)
        generation = _translated(body, request_id(request))
    pieces = runtime.service.generate(generation)
    if not body.stream:
        whole = await fold(pieces)
        return JSONResponse(_whole_body(whole), headers=whole.headers())
    head = await opened(pieces)
    return EventStream(encode(_events(head), request.url.path), head, server_timing(head.timings(), "queue", "prefill"))


async def tokenize(request: Request) -> Response:
    """Serve `POST /tokenize`."""
    body = await read_body(request, TokenizeBody)
    service = runtime_of(request).service
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages.", field="prompt")
    if body.prompt is not None:
        token_ids = await service.tokenize(body.prompt, body.add_special_tokens is not False)
    else:
        token_ids = await service.tokenize_chat([template_message(message) for message in body.messages or ()], {})
    return JSONResponse({"token_ids": token_ids, "num_tokens": len(token_ids)})


async def detokenize(request: Request) -> Response:
    """Serve `POST /detokenize`."""
    body = await read_body(request, DetokenizeBody)
    text = await runtime_of(request).service.detokenize(body.token_ids, body.skip_special_tokens is not False)
    return JSONResponse({"text": text})


def _translated(body: GenerateBody, identity: str) -> GenerationRequest:
    if (body.prompt is None) == (body.token_ids is None):
        raise InvalidRequest("Send either prompt or token_ids.", field="prompt")
    return GenerationRequest(
        params=body.params(max_tokens=body.max_tokens, logprobs=body.logprobs, beam_width=body.beam_width),
        api="native",
        request_id=identity,
        prompt=body.prompt,
        token_ids=body.token_ids,
        add_special_tokens=body.add_special_tokens is not False,
    )


async def _events(pieces: Pieces) -> AsyncIterator[Json]:
    """Yield an event for each text delta with its token ids, and one that ends each choice.

    The text of beams comes at once, after the search.
    """
    async for piece in pieces:
        if isinstance(piece, Accepted):
            continue
        event: Json = {"index": piece.choice, "text": "", "token_ids": []}
        if isinstance(piece, ChoiceFinished):
            yield event | {"finish_reason": piece.reason, "usage": _usage_body(piece.usage)}
        else:
            event |= {"text": piece.text, "token_ids": piece.token_ids}
            yield event | {"logprobs": _scored(piece.logprobs)} if piece.logprobs else event


def _whole_body(whole: Whole) -> Json:
    """Return the response body with the first choice's fields at the top level.

    If there are several choices, the body also has a list of all of them.
    """
    bodies = [_choice_body(choice) for choice in whole.choices]
    body = {name: value for name, value in bodies[0].items() if name != "index"} | {"usage": _usage_body(whole.usage)}
    return body if len(bodies) == 1 else body | {"choices": bodies}


def _choice_body(choice: Choice) -> Json:
    body: Json = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.reason,
    }
    return body | {"logprobs": _scored(choice.logprobs)} if choice.logprobs else body


def _scored(tokens: list[ScoredToken] | tuple[ScoredToken, ...]) -> list[Json]:
    return [_score(token) | {"top": [_score(other) for other in token.top]} for token in tokens]


def _score(token: ScoredToken) -> Json:
    return {"token_id": token.token_id, "text": token.text, "logprob": token.logprob}


def _usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
