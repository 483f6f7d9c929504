"""Generate extension of the Open Inference Protocol: text in, text out, complete or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.dependencies import counting_refusals, request_id, runtime_of
from app.api.fold import fold, server_timing
from app.api.oip import check_origin, served
from app.api.oip_schemas import GenerateParameters, OipGenerateBody
from app.api.oip_wire import VERSION
from app.api.schemas import parse
from app.api.streaming import EventStream, Pieces, encode, opened
from app.errors import InvalidRequest
from app.generation import Accepted, ChoiceFinished, GenerationRequest, ScoredToken
from app.messages import SamplingParams
from app.served import ServedDecoder

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 20  # the extension's default


async def generate(request: Request) -> Response:
    """Serve `POST /v2/models/{name}/generate`."""
    return await _answer(request, stream=False)


async def generate_stream(request: Request) -> Response:
    """Serve `POST /v2/models/{name}/generate_stream`."""
    return await _answer(request, stream=True)


async def _answer(request: Request, stream: bool) -> Response:
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "oip"):
        check_origin(request)
        served(request)
        model = runtime.service.decoder
        body, given = _read(await request.body(), stream)
        params = _params(given)
    shape = _Shape(model, body.id, params, bool(given.get("details")))
    asked = GenerationRequest(params=params, api="oip", request_id=request_id(request), prompt=body.text_input)
    pieces = runtime.service.generate(asked)
    if stream:
        head = await opened(pieces)
        events = encode(shape.events(head), request.url.path)
        return EventStream(events, head, server_timing(head.timings(), "queue", "prefill"))
    whole = await fold(pieces)
    choice = whole.choices[0]
    assert choice.finished is not None, "a complete response has finished"
    return JSONResponse(shape.whole(choice.text, choice.logprobs, choice.finished), headers=whole.headers())


def _read(body: bytes, stream: bool) -> tuple[OipGenerateBody, Json]:
    """Return the body and its parameters, which may be in `parameters` or at the top level."""
    if not body.strip():
        raise InvalidRequest("The body is empty: send a JSON object with text_input.")
    parsed = parse(OipGenerateBody, body)
    given: Json = {}
    for place in (parsed, parsed.parameters or GenerateParameters()):
        for name in GenerateParameters.model_fields:
            if (value := getattr(place, name)) is None:
                continue
            if name in given:
                raise InvalidRequest(f"{name} is given both in parameters and at the top level: send it once.", field=name)
            given[name] = value
    if given.get("stream", stream) != stream:
        other = "generate_stream" if given["stream"] else "generate"
        raise InvalidRequest(f"stream does not go with this route: use {other}.", field="stream")
    return parsed, given


def _params(given: Json) -> SamplingParams:
    if given.get("n", 1) != 1:
        raise InvalidRequest("This route returns one text: n must be 1.", field="n")
    sampling = {name: value for name, value in given.items() if name not in ("details", "stream", "max_tokens")}
    logprobs = 0 if given.get("details") else None
    return GenerateParameters(**sampling).params(max_tokens=given.get("max_tokens", DEFAULT_MAX_TOKENS), logprobs=logprobs)


class _Shape:
    """Formatter of complete responses and stream events."""

    def __init__(self, model: ServedDecoder, identity: str | None, params: SamplingParams, details: bool) -> None:
        self._model, self._params, self._details = model, params, details
        self._about: Json = {"model_name": model.name, "model_version": VERSION} | ({} if identity is None else {"id": identity})

    def whole(self, text: str, tokens: Iterable[ScoredToken], finished: ChoiceFinished) -> Json:
        body = self._about | {"text_output": text}
        if not self._details:
            return body
        usage = {"prompt_tokens": finished.usage.prompt_tokens, "completion_tokens": finished.usage.completion_tokens}
        logprobs = [self._token(token) for token in tokens]
        return body | {"details": {"finish_reason": self._reason(finished), "logprobs": logprobs} | usage}

    async def events(self, pieces: Pieces) -> AsyncIterator[Json]:
        """Yield the stream's events, whose texts join to the complete text.

        With details there is one event per token, and a last one with the finish reason.
        """
        told = False
        async for piece in pieces:
            if isinstance(piece, Accepted):
                continue
            if isinstance(piece, ChoiceFinished):
                if self._details or not told:
                    yield self._event("", None, self._reason(piece))
                continue
            for token in piece.logprobs[:-1]:
                yield self._event("", token, None)
            yield self._event(piece.text, piece.logprobs[-1] if piece.logprobs else None, None)
            told = True

    def _event(self, text: str, token: ScoredToken | None, reason: str | None) -> Json:
        body = self._about | {"text_output": text}
        if not self._details:
            return body
        return body | {"details": {"finish_reason": reason, "token": None if token is None else self._token(token)}}

    def _reason(self, finished: ChoiceFinished) -> str:
        """Return the finish reason as one of the extension's three.

        A timeout is reported as `length`, since it too is a limit that cut the text short.
        """
        if finished.reason != "stop":
            return "length"
        matched = finished.matched_stop
        return "stop_sequence" if isinstance(matched, str) or matched in self._params.stop_token_ids else "eos_token"

    def _token(self, token: ScoredToken) -> Json:
        special = not self._model.tokenizer.has_text(token.token_id)
        return {"id": token.token_id, "text": token.text, "logprob": token.logprob, "special": special}
