"""llama.cpp's own completion, complete or streamed, at `/completion` and `/completions`, and `/infill`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, NotRequired

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.llama_cpp.probabilities import model_probabilities, num_scored_tokens, sampled_probabilities
from app.api.llama_cpp.schemas import LLAMA_CPP_ERRORS, InfillBody, LlamaCppBody, PromptParts, joined_ids
from app.api.openai.schemas import CompletionBody
from app.api.openai.translate import MAX_TOTAL_CHOICES, completion_requests
from app.api.routing import (
    BODY_ERRORS,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    count_refusals,
    renamed_fields,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.api.schemas import SamplingFields, make_body
from app.api.streaming import (
    CollectedChoice,
    CollectedCompletion,
    EventEncoding,
    GenerationStream,
    merge_streams,
    respond,
)
from app.errors import InvalidRequest
from app.messages import SamplingParams
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, Infill, ScoredToken, TextDelta

Json = dict[str, Any]
_FORBIDDEN_BIAS = -100.0  # what `false` means
_RANDOM_SEEDS = (-1, 2**32 - 1)
_FIELD_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "token_ids": "prompt",
}


class LlamaCppTimings(TypedDict):
    """Tokens and times of the prompt and of the completion, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCppCompletion(TypedDict):
    """Response of `POST /completion`, and event of a streamed one. The last event of a prompt has `stop`."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[dict[str, Any]]]
    model: NotRequired[str]
    generation_settings: NotRequired[dict[str, Any]]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    stop_type: NotRequired[str]
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    timings: NotRequired[LlamaCppTimings]


router = DialectRouter("llama.cpp", LLAMA_CPP_ERRORS)
_EVENTS = EventEncoding(LLAMA_CPP_ERRORS)


@router.post(
    "/completion",
    summary="llama.cpp: completion",
    response_model=LlamaCppCompletion | list[LlamaCppCompletion],
    responses=router.failures(*BODY_ERRORS, 504) | router.event_stream(LlamaCppCompletion),
    response_description="The completion, or a list if there are several; with `stream`, its events.",
)
async def completion(request: Request, unread: RequestBody[LlamaCppBody]) -> Response:
    """Serve `POST /completion`; each prompt becomes a separate request to the service."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES):
        with count_refusals(runtime.metrics, "llama_cpp"):
            body = await unread.parse(needs_type=False)
            runtime.service.decoder  # noqa: B018  # another kind of model is refused whatever the body is
            requests = await _requests(runtime, body, request_id(request))
        return await _respond(runtime, body, requests)


@router.post(
    "/infill",
    summary="llama.cpp: code between a prefix and a suffix",
    response_model=LlamaCppCompletion | list[LlamaCppCompletion],
    responses=router.failures(*BODY_ERRORS, 504) | router.event_stream(LlamaCppCompletion),
    response_description="The completion, or a list if there are several; with `stream`, its events.",
)
async def infill(request: Request, unread: RequestBody[InfillBody]) -> Response:
    """Serve `POST /infill`."""
    runtime = runtime_of(request)
    with renamed_fields(_FIELD_NAMES | {"suffix": "input_suffix"}):
        with count_refusals(runtime.metrics, "llama_cpp"):
            body = await unread.parse(needs_type=False)
            runtime.service.decoder  # noqa: B018  # another kind of model is refused whatever the body is
            base = await _base_request(runtime, body, request_id(request))
        files = tuple((one.filename or "file", one.text) for one in body.input_extra or ())
        gap = Infill(body.input_suffix, files, fits=True)
        return await _respond(runtime, body, [replace(base, prompt=body.input_prefix + body.prompt, infill=gap)])


async def _respond(runtime: ApiRuntime, body: LlamaCppBody, requests: list[GenerationRequest]) -> Response:
    params = requests[0].params
    name = body.model if body.model and runtime.service.adapters.find(body.model) else runtime.service.model.name
    streams: list[GenerationStream] = [runtime.service.generate(replace(each, model=name)) for each in requests]
    stream = streams[0] if len(streams) == 1 else merge_streams(streams, params.n)
    format_ = _LlamaCppFormat(runtime, name, body, params, await _prompt_texts(runtime, requests))
    return await respond(stream, format_, _EVENTS, streams=body.stream)


# ---- translation ---------------------------------------------------------------------------------------------------


async def _requests(runtime: ApiRuntime, body: LlamaCppBody, identity: str) -> list[GenerationRequest]:
    """Return one request for each prompt."""
    base = await _base_request(runtime, body, identity)
    if len(body.prompt) * base.params.n > MAX_TOTAL_CHOICES:
        raise InvalidRequest(f"The number of prompts times n may be at most {MAX_TOTAL_CHOICES}.", field="prompt")
    return [await _with_prompt(runtime, base, prompt) for prompt in body.prompt]


async def _base_request(runtime: ApiRuntime, body: LlamaCppBody, identity: str) -> GenerationRequest:
    """Return a request with the body's parameters, whose prompt has no meaning."""
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    penalty = body.repeat_penalty if body.repetition_penalty is None else body.repetition_penalty
    shared |= {
        "max_tokens": None if limit is None or limit < 0 else limit,
        "repetition_penalty": penalty,
        "top_k": 0 if body.top_k is not None and body.top_k < 0 else body.top_k,
        "seed": None if body.seed in _RANDOM_SEEDS else body.seed,
        "logit_bias": await _logit_bias(runtime, body),
        "logprobs": body.n_probs or None,
        "grammar": body.grammar,
        "json_schema": body.json_schema,
    }
    chosen = completion_requests(make_body(CompletionBody, prompt="-", **shared), identity, sampling_defaults(runtime))[
        0
    ]
    # Without n_predict there is no limit, unlike with OpenAI.
    params = replace(chosen.params, max_tokens=shared["max_tokens"])
    if body.post_sampling_probs and body.n_probs:
        params = replace(params, logprobs=num_scored_tokens(params, body.n_probs, chosen.grammar is not None))
    return replace(chosen, params=params, api="llama_cpp", clips_max_tokens=True)


async def _with_prompt(runtime: ApiRuntime, request: GenerationRequest, prompt: PromptParts) -> GenerationRequest:
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    return replace(request, prompt=None, token_ids=await joined_ids(runtime.service, prompt))


async def _logit_bias(runtime: ApiRuntime, body: LlamaCppBody) -> dict[str, float] | None:
    """Return biases by token id. A text stands for all its tokens, and `false` forbids a token."""
    biases: dict[str, float] = {}
    for token, bias in body.logit_bias or ():
        is_id = isinstance(token, int) or token.isdecimal()
        ids = [int(token)] if is_id else await runtime.service.tokenize(token, False)
        biases |= dict.fromkeys(map(str, ids), _FORBIDDEN_BIAS if bias is False else float(bias))
    return biases or None


async def _prompt_texts(runtime: ApiRuntime, requests: Iterable[GenerationRequest]) -> list[str]:
    return [
        await runtime.service.detokenize(each.token_ids or (), False) if each.prompt is None else each.prompt
        for each in requests
    ]


# ---- responses -----------------------------------------------------------------------------------------------------


class _LlamaCppFormat:
    def __init__(
        self, runtime: ApiRuntime, name: str, body: LlamaCppBody, params: SamplingParams, prompts: list[str]
    ) -> None:
        served = runtime.service.decoder
        self._model, self._body, self._params, self._prompts = name, body, params, prompts
        self._eos_token_ids, self._context = served.tokenizer.eos_token_ids, served.limits.max_model_len

    def whole(self, completion: CollectedCompletion) -> Json | list[Json]:
        """Return the body of the only choice, or a list with one for each choice of each prompt."""
        counts = [len(ids) for ids in completion.prompt_token_ids]
        bodies = [
            self._selected(self._whole(choice, counts[choice.index // self._params.n])) for choice in completion.choices
        ]
        return bodies[0] if len(bodies) == 1 else bodies

    def _whole(self, choice: CollectedChoice, num_prompt: int) -> Json:
        assert choice.finished is not None, "a complete response has finished"
        last = self._last(choice.finished, num_prompt, "\n" in choice.text)
        tokens = choice.token_ids if self._body.return_tokens else []
        return last | {"content": choice.text, "tokens": tokens} | self._probabilities(choice.logprobs)

    async def events(self, stream: GenerationStream) -> AsyncIterator[Json]:
        """Yield an event for each delta, and one that ends each choice."""
        counts: list[int] = []
        predicted: dict[int, int] = {}
        lines: set[int] = set()
        async for event in stream:
            if isinstance(event, Accepted):
                counts.append(len(event.prompt_token_ids))
                continue
            num_prompt = counts[event.choice // self._params.n]
            if isinstance(event, ChoiceFinished):
                yield self._selected(self._last(event, num_prompt, event.choice in lines))
                continue
            predicted[event.choice] = predicted.get(event.choice, 0) + len(event.token_ids)
            lines |= {event.choice} if "\n" in event.text else set()
            yield self._delta(event, num_prompt, predicted[event.choice]) | self._probabilities(event.logprobs)

    def _probabilities(self, tokens: Iterable[ScoredToken]) -> Json:
        if self._body.post_sampling_probs:
            return sampled_probabilities(tokens, self._params, self._body.n_probs or 0)
        return model_probabilities(tokens)

    def _delta(self, event: TextDelta, num_prompt: int, num_predicted: int) -> Json:
        return {
            "index": event.choice,
            "content": event.text,
            "tokens": event.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_prompt,
        }

    def _last(self, finished: ChoiceFinished, num_prompt: int, has_new_line: bool) -> Json:
        predicted = finished.num_completion_tokens
        return {
            "index": finished.choice,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": predicted,
            "tokens_evaluated": num_prompt,
            "generation_settings": sampling_settings(self._params, self._eos_token_ids),
            "prompt": self._prompts[finished.choice // self._params.n],
            "has_new_line": has_new_line,
            "truncated": finished.reason == "length" and num_prompt + predicted >= self._context,
            **_stop(finished),
            "tokens_cached": num_prompt + predicted,
            "timings": _timings(finished, num_prompt),
        }

    def _selected(self, body: Json) -> Json:
        """Return the fields that the client wants; `a/b` is the field b of a, under that name."""
        names = self._body.response_fields
        if not names:
            return body
        found: Json = {}
        for name in names:
            value: Any = body
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found


def sampling_settings(params: SamplingParams, eos_token_ids: Iterable[int] = ()) -> Json:
    """Return sampling parameters under llama.cpp's names.

    There `ignore_eos` is a bias of minus infinity, null in JSON, of every token that ends a text.
    """
    limit = -1 if params.max_tokens is None else params.max_tokens
    ignored = [(token_id, None) for token_id in sorted(eos_token_ids)] if params.ignore_eos else []
    return {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop,
        "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in (*params.logit_bias, *ignored)],
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
    }


def _stop(finished: ChoiceFinished) -> Json:
    if finished.reason != "stop":
        return {"stop_type": "limit", "stopping_word": ""}
    word = finished.matched_stop
    return (
        {"stop_type": "word", "stopping_word": word}
        if isinstance(word, str)
        else {"stop_type": "eos", "stopping_word": ""}
    )


def _timings(finished: ChoiceFinished, num_prompt: int) -> Json:
    timings, predicted = finished.timings, finished.num_completion_tokens
    computed = num_prompt - timings.cached_tokens
    prompt_ms, predicted_ms = timings.prefill_seconds * 1e3, timings.decode_seconds * 1e3
    return {
        "cache_n": timings.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if computed else 0.0,
        "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": predicted / predicted_ms * 1e3 if predicted_ms else 0.0,
    }
