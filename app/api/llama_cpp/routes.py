"""llama.cpp dialect: completion in its own format, infill, and what its clients read of the server."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from app.api.llama_cpp.schemas import (
    LLAMA_CPP_ERRORS,
    ControlledModel,
    HealthStatus,
    InfillBody,
    LlamaCppBody,
    LlamaCppCompletion,
    LlamaCppTimings,
    LlamaCppToken,
    ModelNameBody,
    PromptParts,
    PromptWithPictures,
    RenderedPrompt,
    SamplingSettings,
    ServerProperties,
    ServerVersion,
    Slot,
)
from app.api.openai.output import LOWEST_LOGPROB
from app.api.openai.schemas import ChatBody, CompletionBody
from app.api.openai.translate import MAX_TOTAL_CHOICES, chat_request, completion_requests
from app.api.routing import (
    BODY_ERRORS,
    ApiCall,
    ApiRuntime,
    Dialect,
    check_model,
    controlled_models,
    known_model,
    sampling_defaults,
)
from app.api.schemas import SamplingFields, make_body
from app.api.streaming import (
    SLOT,
    CollectedChoice,
    CollectedCompletion,
    EventEncoding,
    Generation,
    GenerationStream,
    json_list,
    json_string,
    write_directly,
)
from app.errors import InvalidRequest, NotReady, UnsupportedParameter
from app.messages import MAX_LOGPROBS, SamplingParams
from app.service.requests import MEDIA_MARKER, Accepted, ChoiceFinished, GenerationRequest, Infill, Picture, ScoredToken
from app.service.served_model import ServedDecoder
from app.service.service import Service
from app.version import VERSION


def num_scored_tokens(params: SamplingParams, num_probs: int, has_grammar: bool) -> int:
    """Return how many likely tokens must be known to give the probabilities of some after sampling.

    Raises `UnsupportedParameter` if they depend on more tokens than can be known.
    """
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    rules = (params.logit_bias, params.bad_words, params.allowed_token_ids, params.min_tokens, has_grammar)
    if not any(penalties) and not any(rules):
        if params.temperature == 0:
            return num_probs
        if 0 < params.top_k <= MAX_LOGPROBS:
            return max(num_probs, params.top_k)
        if params.temperature == 1 and params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
            return num_probs
    raise UnsupportedParameter(
        f"post_sampling_probs needs top_k from 1 to {MAX_LOGPROBS}, or temperature 0, or temperature 1 without top_k, "
        "top_p and min_p; and no penalties, biases, rules about tokens or grammar.",
        field="post_sampling_probs",
    )


def model_probabilities(tokens: Iterable[ScoredToken]) -> list[LlamaCppToken]:
    bodies: list[LlamaCppToken] = []
    for token in tokens:
        body = _scored(token)
        body["top_logprobs"] = [_scored(other) for other in token.top]
        bodies.append(body)
    return bodies


def sampled_probabilities(tokens: Iterable[ScoredToken], params: SamplingParams, num_probs: int) -> list[LlamaCppToken]:
    """Return the probabilities that each token was sampled from, without zeros."""
    bodies: list[LlamaCppToken] = []
    for token in tokens:
        kept = _kept_probabilities(token, params)
        likely = [(one, kept[one.token_id]) for one in token.top if kept.get(one.token_id, 0.0) > 0.0]
        # A token whose probability was rounded differently at the edge of top_p is never shown with none.
        body = _likely(token, kept.get(token.token_id) or math.exp(token.logprob))
        body["top_probs"] = [_likely(one, share) for one, share in likely[:num_probs]]
        bodies.append(body)
    return bodies


def _scored(token: ScoredToken) -> LlamaCppToken:
    logprob = max(token.logprob, LOWEST_LOGPROB)
    return {"id": token.token_id, "token": token.text, "bytes": list(token.bytes), "logprob": logprob}


def _likely(token: ScoredToken, probability: float) -> LlamaCppToken:
    return {
        "id": token.token_id,
        "token": token.text,
        "bytes": list(token.bytes),
        "prob": min(probability, 1.0),
    }


def _kept_probabilities(token: ScoredToken, params: SamplingParams) -> Mapping[int, float]:
    """Return the probability of each of the most likely tokens after temperature, top_k, top_p and min_p."""
    if params.temperature == 0:
        return {token.token_id: 1.0}
    if params.top_k == 0:
        return {one.token_id: math.exp(one.logprob) for one in (*token.top, token)}
    top = token.top[: params.top_k]
    best = top[0].logprob
    weights = [math.exp((one.logprob - best) / params.temperature) for one in top]
    shares = [weight / sum(weights) for weight in weights]
    kept: dict[int, float] = {}
    nucleus = 0.0
    for one, share in zip(top, shares, strict=True):
        if nucleus >= params.top_p or share < params.min_p * shares[0]:
            break
        kept[one.token_id] = share
        nucleus += share
    return {token_id: share / nucleus for token_id, share in kept.items()}


_IMAGE_PLACE = re.compile(r"\[img-(\d{1,18})\]")
_FORBIDDEN_BIAS = -100.0  # what `false` means
_RANDOM_SEEDS = (-1, 2**32 - 1)
_FIELD_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "token_ids": "prompt",
}


# ---- translation ---------------------------------------------------------------------------------------------------


async def joined_ids(service: Service, parts: Sequence[str | int]) -> tuple[int, ...]:
    """Return the token ids of texts and ids in one sequence. Special tokens are added at its beginning only."""
    if str not in set(map(type, parts)):
        return tuple(part for part in parts if isinstance(part, int))
    ids: list[int] = []
    for place, part in enumerate(parts):
        ids += [part] if isinstance(part, int) else await service.tokenize(part, place == 0)
    return tuple(ids)


async def _requests(runtime: ApiRuntime, body: LlamaCppBody) -> list[GenerationRequest]:
    base = await _base_request(runtime, body)
    if len(body.prompt) * base.params.n > MAX_TOTAL_CHOICES:
        raise InvalidRequest(f"The number of prompts times n may be at most {MAX_TOTAL_CHOICES}.", field="prompt")
    if body.image_data:
        return [_with_image_data(base, body)]
    return [await _with_prompt(runtime, base, prompt) for prompt in body.prompt]


async def _base_request(runtime: ApiRuntime, body: LlamaCppBody) -> GenerationRequest:
    """Return a request with the body's parameters; its prompt has no meaning."""
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
    completion = make_body(CompletionBody, prompt="-", **shared)
    chosen = completion_requests(completion, sampling_defaults(runtime))[0]
    # Without n_predict there is no limit, unlike with OpenAI.
    params = replace(chosen.params, max_tokens=shared["max_tokens"])
    if body.post_sampling_probs and body.n_probs:
        params = replace(params, logprobs=num_scored_tokens(params, body.n_probs, chosen.grammar is not None))
    return replace(chosen, params=params, clips_max_tokens=True)


async def _with_prompt(runtime: ApiRuntime, request: GenerationRequest, prompt: PromptParts) -> GenerationRequest:
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    if isinstance(prompt, PromptWithPictures):
        pictures = (Picture(data, f"prompt.multimodal_data[{place}]") for place, data in enumerate(prompt.pictures))
        return replace(request, prompt=prompt.text, pictures=tuple(pictures))
    return replace(request, prompt=None, token_ids=await joined_ids(runtime.service, prompt))


def _with_image_data(request: GenerationRequest, body: LlamaCppBody) -> GenerationRequest:
    """Return a request for a prompt with `[img-ID]` in the places of pictures."""
    if len(body.prompt) != 1 or not isinstance(body.prompt[0], str):
        raise InvalidRequest("image_data needs a prompt that is one text with [img-ID].", field="prompt")
    given = {one.id: Picture(one.data, f"image_data[{place}]") for place, one in enumerate(body.image_data or ())}
    named = [int(name) for name in _IMAGE_PLACE.findall(body.prompt[0])]
    if (unknown := next((name for name in named if name not in given), None)) is not None:
        raise InvalidRequest(f"prompt has [img-{unknown}], and image_data no picture with this id.", field="prompt")
    if (unused := next((name for name in given if name not in named), None)) is not None:
        field = given[unused].field
        raise InvalidRequest(f"{field} has the id {unused}, and the prompt no [img-{unused}].", field=field)
    text = _IMAGE_PLACE.sub(MEDIA_MARKER, body.prompt[0])
    return replace(request, prompt=text, pictures=tuple(given[name] for name in named))


async def _logit_bias(runtime: ApiRuntime, body: LlamaCppBody) -> dict[str, float] | None:
    """Return biases by token id. A text stands for all its tokens, and `false` forbids a token."""
    biases: dict[str, float] = {}
    for token, bias in body.logit_bias or ():
        is_id = isinstance(token, int) or token.isdecimal()
        ids = [int(token)] if is_id else await runtime.service.tokenize(token, False)
        biases |= dict.fromkeys(map(str, ids), _FORBIDDEN_BIAS if bias is False else float(bias))
    return biases or None


# ---- responses -------------------------------------------------------------------------------------------------------


class _LlamaCppFormat:
    def __init__(
        self, call: ApiCall, name: str, body: LlamaCppBody, params: SamplingParams, prompts: list[str]
    ) -> None:
        served = call.service.decoder
        self._model, self._body, self._params, self._prompts = name, body, params, prompts
        self._eos_token_ids, self._context = served.tokenizer.eos_token_ids, served.limits.max_model_len

    def whole(self, completion: CollectedCompletion) -> LlamaCppCompletion | list[LlamaCppCompletion]:
        """Return the body of the only choice, or a list with one for each choice of each prompt."""
        counts = [len(ids) for ids in completion.prompt_token_ids]
        bodies = [self._whole(choice, counts[choice.index // self._params.n]) for choice in completion.choices]
        return bodies[0] if len(bodies) == 1 else bodies

    def _whole(self, choice: CollectedChoice, num_prompt: int) -> LlamaCppCompletion:
        assert choice.finished is not None, "a complete response has finished"
        body = self._last(choice.finished, num_prompt, "\n" in choice.text)
        body["content"] = choice.text
        if self._body.return_tokens:
            body["tokens"] = choice.token_ids
        return self._selected(self._scored(body, choice.logprobs))

    async def events(self, stream: GenerationStream) -> AsyncIterator[LlamaCppCompletion]:
        """Yield an event for each delta, and one that ends each choice."""
        counts: list[int] = []
        predicted: dict[int, int] = {}
        lines: set[int] = set()

        def next_values(text: str, token_ids: Sequence[int]) -> tuple[str, ...]:
            predicted[0] += len(token_ids)
            lines.update({0} if "\n" in text else ())
            return json_string(text), json_list(token_ids), str(predicted[0])

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
            delta: LlamaCppCompletion = {
                "index": event.choice,
                "content": event.text,
                "tokens": list(event.token_ids),
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": predicted[event.choice],
                "tokens_evaluated": num_prompt,
            }
            yield self._scored(delta, event.logprobs)
            write_directly(stream, {**delta, "content": SLOT, "tokens": SLOT, "tokens_predicted": SLOT}, next_values)

    def _scored(self, body: LlamaCppCompletion, tokens: Sequence[ScoredToken]) -> LlamaCppCompletion:
        if tokens and self._body.post_sampling_probs:
            body["completion_probabilities"] = sampled_probabilities(tokens, self._params, self._body.n_probs or 0)
        elif tokens:
            body["completion_probabilities"] = model_probabilities(tokens)
        return body

    def _last(self, finished: ChoiceFinished, num_prompt: int, has_new_line: bool) -> LlamaCppCompletion:
        predicted, word = finished.num_completion_tokens, finished.matched_stop
        is_word = finished.reason == "stop" and isinstance(word, str)
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
            "stop_type": "word" if is_word else "eos" if finished.reason == "stop" else "limit",
            "stopping_word": str(word) if is_word else "",
            "tokens_cached": num_prompt + predicted,
            "timings": _timings(finished, num_prompt),
        }

    def _selected(self, body: LlamaCppCompletion) -> LlamaCppCompletion:
        """Return the fields that the client wants; `a/b` is the field b of a, under that name."""
        found: dict[str, Any] = {}
        for name in self._body.response_fields or ():
            value: Any = body
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return cast(LlamaCppCompletion, found) if self._body.response_fields else body


def sampling_settings(params: SamplingParams, eos_token_ids: Iterable[int] = ()) -> SamplingSettings:
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
        "stop": list(params.stop),
        "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in (*params.logit_bias, *ignored)],
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
    }


def _timings(finished: ChoiceFinished, num_prompt: int) -> LlamaCppTimings:
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


# ---- routes ----------------------------------------------------------------------------------------------------------

PROBES = Dialect("llama.cpp", LLAMA_CPP_ERRORS, public=True)
LLAMA_CPP = Dialect("llama.cpp", LLAMA_CPP_ERRORS, needs_type=False)
_FIELD_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "token_ids": "prompt",
}
Completion = Generation[LlamaCppCompletion | list[LlamaCppCompletion], LlamaCppCompletion]


def _find_model(call: ApiCall, body: LlamaCppBody) -> str:
    """Return the adapter's name if the body names one; all other names are the model's, unless there are several."""
    if call.runtime.models is not None:
        return check_model(call.runtime, body.model)
    is_adapter = body.model and call.service.adapters.find(body.model)
    return body.model if body.model and is_adapter else call.service.model.name


def _any_model(call: ApiCall, body: ModelNameBody) -> str:
    return body.model  # it is looked for once clients may load models


_GENERATION: dict[str, Any] = {
    "operation": "text_completion",
    "encoding": EventEncoding(LLAMA_CPP_ERRORS),
    "statuses": (*BODY_ERRORS, 504),
    "find_model": _find_model,
    "openapi": {"response_description": "The completion, or a list if there are several; with `stream`, its events."},
}


@LLAMA_CPP.generates(
    ("/completion", "/completions"),
    "llama.cpp: completion",
    prompts=("prompt", "prompt[]"),
    field_names=_FIELD_NAMES,
    **_GENERATION,
)
async def completion(call: ApiCall, body: LlamaCppBody, name: str) -> Completion:
    """Complete each prompt, as a request of its own."""
    requests = await _requests(call.runtime, body)
    prompts = [
        await call.service.detokenize(each.token_ids or (), False) if each.prompt is None else each.prompt
        for each in requests
    ]
    return Generation(requests, _LlamaCppFormat(call, name, body, requests[0].params, prompts), body.stream)


@LLAMA_CPP.generates(
    "/infill",
    "llama.cpp: code between a prefix and a suffix",
    field_names=_FIELD_NAMES | {"suffix": "input_suffix"},
    **_GENERATION,
)
async def infill(call: ApiCall, body: InfillBody, name: str) -> Completion:
    """Fill a gap."""
    files = tuple((one.filename or "file", one.text) for one in body.input_extra or ())
    prompt, gap = body.input_prefix + body.prompt, Infill(body.input_suffix, files, fits=True)
    request = replace(await _base_request(call.runtime, body), prompt=prompt, infill=gap)
    return Generation([request], _LlamaCppFormat(call, name, body, request.params, [prompt]), body.stream)


@PROBES.get(("/health", "/ping"), "Readiness, as /readyz, in llama.cpp's format", statuses=(503,))
async def health(call: ApiCall) -> HealthStatus:
    """Report readiness; 503 while the model is loading."""
    models = call.runtime.models
    if call.service.ready if models is None else models.ready:
        return {"status": "ok"}
    raise NotReady(f"The model is not ready: {call.service.stage}.")


@LLAMA_CPP.get("/version", "Version of the server")
async def version(call: ApiCall) -> ServerVersion:
    """Return the server's version."""
    return {"version": VERSION}


@LLAMA_CPP.get("/props", "llama.cpp: properties of the server", statuses=(503,))
async def properties(call: ApiCall) -> ServerProperties:
    """Describe the model and the parameters of a request that gives none."""
    served = call.service.model
    decoder = served if isinstance(served, ServedDecoder) else None
    names = {} if decoder is None else decoder.tokenizer.named_tokens
    defaults: Mapping[str, Any] = sampling_defaults(call.runtime)
    return {
        "default_generation_settings": {
            "params": sampling_settings(SamplingParams(**defaults)),
            "n_ctx": served.limits.max_model_len,
        },
        "total_slots": served.limits.max_running_seqs,
        "model_path": served.name,
        "model_alias": served.name,
        "chat_template": "" if decoder is None or decoder.chat is None else decoder.chat.source,
        "modalities": {"vision": decoder is not None and decoder.pictures is not None, "audio": False},
        "media_marker": MEDIA_MARKER,
        "bos_token": names.get("bos_token", ""),
        "eos_token": names.get("eos_token", ""),
        "build_info": f"armature-{VERSION}",
    }


async def _control(call: ApiCall, body: ModelNameBody, loads: bool) -> ControlledModel:
    models = controlled_models(call)
    entry = known_model(models, body.model)
    await (models.load(entry) if loads else models.unload(entry))
    return {"success": True}


@LLAMA_CPP.post("/models/load", "llama.cpp: load one of the configured models", loads=False, find_model=_any_model)
async def load_model(call: ApiCall, body: ModelNameBody) -> ControlledModel:
    """Load a model, if the operator lets clients do so, and answer when it is ready."""
    return await _control(call, body, loads=True)


@LLAMA_CPP.post("/models/unload", "llama.cpp: unload a model", loads=False, find_model=_any_model)
async def unload_model(call: ApiCall, body: ModelNameBody) -> ControlledModel:
    """Unload a model once its open requests have ended."""
    return await _control(call, body, loads=False)


FAIL_ON_NO_SLOT = {
    "name": "fail_on_no_slot",
    "in": "query",
    "description": "1: answer 503 if no slot is free.",
    "schema": {"type": "string"},
}


@LLAMA_CPP.get(
    "/slots",
    "llama.cpp: places for running requests",
    statuses=(503,),
    openapi={"openapi_extra": {"parameters": [FAIL_ON_NO_SLOT]}},
)
async def slots(call: ApiCall) -> list[Slot]:
    """List as many busy slots as requests run. Which request has which slot is not kept."""
    limits, num_running = call.service.model.limits, call.service.snapshot.num_running
    if call.request.query_params.get("fail_on_no_slot") and num_running >= limits.max_running_seqs:
        raise NotReady("No slot is free.")
    return [
        {
            "id": place,
            "id_task": -1,
            "n_ctx": limits.max_model_len,
            "speculative": False,
            "is_processing": place < num_running,
        }
        for place in range(limits.max_running_seqs)
    ]


@LLAMA_CPP.post("/apply-template", "llama.cpp: the prompt that the chat template makes of messages", task="generate")
async def apply_template(call: ApiCall, body: ChatBody) -> RenderedPrompt:
    """Render messages with the chat template."""
    chat = chat_request(body, {})
    return {"prompt": await call.service.render_chat(chat.messages or (), chat.template_arguments, chat.chat_options)}
