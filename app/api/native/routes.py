"""Native dialect: generation from text or token ids, and the tokenizer's routes.

`/tokenize` and `/detokenize` also take the bodies of vLLM, llama.cpp and text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

from pydantic_core import to_json
from starlette.responses import Response

from app.api.encoders.schemas import TEI_ERRORS
from app.api.encoders.vectors import join_with_pauses
from app.api.errors import NATIVE_ERRORS
from app.api.native.schemas import (
    CandidateToken,
    DetokenizeBody,
    DetokenizeResponse,
    GenerateBody,
    GeneratedChoice,
    GenerateEvent,
    GenerateResponse,
    GenerateUsage,
    SampledToken,
    TokenizeBody,
    TokenizeResponse,
    TokenizerInfo,
    TokenPlace,
)
from app.api.openai.translate import pictures_of, template_message
from app.api.routing import ApiCall, Dialect, sampling_defaults
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
from app.errors import InvalidRequest, UnsupportedParameter
from app.service.encode import named_prompt
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, ScoredToken, Usage
from app.service.served_model import ServedDecoder, ServedProgram, ServedTasks, wrong_kind_error
from app.service.service import Service
from app.text.chat import ChatOptions
from app.text.tokenizer import Tokenizer, TokenSpan

NATIVE = Dialect("Native")
_IDS_AT_ONCE = 4096
MAX_PLACED_CHARACTERS = 2**20  # each may be a token, which has some 80 bytes in the response and 150 before it


@NATIVE.generates(
    "/generate",
    "Generate from text or token ids; returns text and token ids",
    operation="text_completion",
    prompts=("prompt",),
    encoding=EventEncoding(NATIVE_ERRORS),
    openapi={"response_description": "The generated text; with `stream`, its events."},
)
async def generate(call: ApiCall, body: GenerateBody, name: str) -> Generation[GenerateResponse, GenerateEvent]:
    """Generate from a text or token ids."""
    if (body.prompt is None) == (body.token_ids is None):
        raise InvalidRequest("Send either prompt or token_ids.", field="prompt")
    request = GenerationRequest(
        params=body.params(
            sampling_defaults(call.runtime),
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            beam_width=body.beam_width,
        ),
        api=call.route.api,
        request_id=call.id,
        prompt=body.prompt,
        token_ids=body.token_ids,
        add_special_tokens=body.add_special_tokens is not False,
        cache_salt=body.cache_salt,
    )
    return Generation([request], _NativeFormat(), body.stream)


class _NativeFormat:
    async def events(self, stream: GenerationStream) -> AsyncIterator[GenerateEvent]:
        """Yield an event for each text delta with its token ids, and one that ends each choice.

        The text of beams comes at once, after the search.
        """
        async for event in stream:
            if isinstance(event, Accepted):
                continue
            if isinstance(event, ChoiceFinished):
                usage = _usage_body(event.usage)
                yield {
                    "index": event.choice,
                    "text": "",
                    "token_ids": [],
                    "finish_reason": event.reason,
                    "usage": usage,
                }
                continue
            body: GenerateEvent = {"index": event.choice, "text": event.text, "token_ids": list(event.token_ids)}
            if event.logprobs:
                body["logprobs"] = _logprob_list(event.logprobs)
            yield body
            plain = {"index": event.choice, "text": SLOT, "token_ids": SLOT}
            write_directly(stream, plain, lambda text, ids: (json_string(text), json_list(ids)))

    def whole(self, completion: CollectedCompletion) -> GenerateResponse:
        """Return the body with the first choice's fields at the top level, and all choices if there are several."""
        first = completion.choices[0]
        body: GenerateResponse = {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.reason,
            "usage": _usage_body(completion.usage),
        }
        if first.logprobs:
            body["logprobs"] = _logprob_list(first.logprobs)
        if len(completion.choices) > 1:
            body["choices"] = [_choice_body(choice) for choice in completion.choices]
        return body


def _choice_body(choice: CollectedChoice) -> GeneratedChoice:
    body: GeneratedChoice = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.reason,
    }
    if choice.logprobs:
        body["logprobs"] = _logprob_list(choice.logprobs)
    return body


def _logprob_list(tokens: Iterable[ScoredToken]) -> list[SampledToken]:
    return [{**_logprob_body(token), "top": [_logprob_body(other) for other in token.top]} for token in tokens]


def _logprob_body(token: ScoredToken) -> CandidateToken:
    return {"token_id": token.token_id, "text": token.text, "logprob": token.logprob}


def _usage_body(usage: Usage) -> GenerateUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


@NATIVE.post(
    "/tokenize",
    "Token ids of a text or a chat; also vLLM's, llama.cpp's and text-embeddings-inference's",
    response=TokenizeResponse | list[list[TokenPlace]],
    other_errors=TEI_ERRORS,
    other_field="inputs",
)
async def tokenize(call: ApiCall, body: TokenizeBody) -> Response:
    """Tokenize a text, a chat or several texts."""
    return Response(await _tokens(call.service, body), media_type="application/json")


async def _tokens(service: Service, body: TokenizeBody) -> bytes:
    if sum(source is not None for source in (body.prompt, body.messages, body.content, body.inputs)) != 1:
        raise InvalidRequest(
            "Send either prompt or messages, or llama.cpp's content, or text-embeddings-inference's inputs.",
            field="prompt",
        )
    if body.inputs is not None:
        return await _tokens_with_places(service, body)
    if body.content is not None:
        _check_placed(body.content, bool(body.returns_texts), "content")
        ids = await service.tokenize(body.content, bool(body.add_special))
        tokens = (to_json(_token_body(_tokenizer(service), token_id)) for token_id in ids)
        listed = await (join_with_pauses(b"[", tokens, b"]") if body.returns_texts else _id_list(ids))
        return b'{"tokens":%b}' % listed
    _check_placed(body.prompt or "", bool(body.return_token_strs), "prompt")
    ids = await _prompt_ids(service, body)
    names = (to_json(_tokenizer(service).token_text(token_id)) for token_id in ids)
    strings = await join_with_pauses(b"[", names, b"]") if body.return_token_strs else b"null"
    listed, limit = await _id_list(ids), service.model.limits.max_model_len
    response = b'{"token_ids":%b,"num_tokens":%d,"tokens":%b,"count":%d,"max_model_len":%d,"token_strs":%b}'
    return response % (listed, len(ids), listed, len(ids), limit, strings)


async def _id_list(ids: list[int]) -> bytes:
    """Return a JSON list of token ids in parts; the event loop runs other tasks between them."""
    starts = range(0, len(ids), _IDS_AT_ONCE)
    return await join_with_pauses(b"[", (to_json(ids[start : start + _IDS_AT_ONCE])[1:-1] for start in starts), b"]")


def _check_placed(text: str, is_wanted: bool, field: str) -> None:
    """Check the length of a text if its tokens are wanted with their texts."""
    if is_wanted and len(text) > MAX_PLACED_CHARACTERS:
        raise InvalidRequest(
            f"{field} may have {MAX_PLACED_CHARACTERS} characters if the tokens' texts are wanted: send less, or ask for "
            "ids alone.",
            field=field,
        )


async def _prompt_ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return await service.tokenize(body.prompt, body.add_special_tokens is not False)
    messages = [template_message(message) for message in body.messages or ()]
    options = ChatOptions(
        tools=tuple(
            tool.model_dump(exclude_none=True) | {"type": "function"} for tool in body.tools or () if tool.is_offered
        ),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    arguments = body.chat_template_kwargs or {}
    pictures = pictures_of(body.messages or ())
    if not body.add_special_tokens:  # the template writes all special tokens
        return list(await service.tokenize_chat(messages, arguments, options, pictures))
    if pictures:
        raise UnsupportedParameter("add_special_tokens cannot be combined with pictures.", field="add_special_tokens")
    return await service.tokenize(await service.render_chat(messages, arguments, options))


async def _tokens_with_places(service: Service, body: TokenizeBody) -> bytes:
    """Return text-embeddings-inference's response: the tokens of each text, and of the checkpoint's prompt before it."""
    texts = (body.inputs,) if isinstance(body.inputs, str) else body.inputs or ()
    if sum(map(len, texts)) > MAX_PLACED_CHARACTERS:
        raise InvalidRequest(
            f"inputs may have {MAX_PLACED_CHARACTERS} characters in total: send fewer, or send prompt for ids alone.",
            field="inputs",
        )
    prompt = "" if body.prompt_name is None else named_prompt(service.model, body.prompt_name)
    rows = []
    for text in texts:
        spans = await service.tokenize_spans(prompt + text, body.add_special_tokens is not False)
        tokens = (to_json(_token_place(_tokenizer(service), prompt + text, span)) for span in spans)
        rows.append(await join_with_pauses(b"[", tokens, b"]"))
    return await join_with_pauses(b"[", rows, b"]")


def _token_place(tokenizer: Tokenizer, text: str, span: TokenSpan) -> TokenPlace:
    return {
        "id": span.token_id,
        "text": tokenizer.token_text(span.token_id) if span.start is None else text[span.start : span.stop],
        "special": not tokenizer.has_text(span.token_id),
        "start": span.start,
        "stop": span.stop,
    }


def _token_body(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Return a token's id and text; bytes that are not whole characters as numbers."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": spelled.decode() or tokenizer.token_text(token_id)}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(spelled)}


@NATIVE.post("/detokenize", "Text of token ids; also vLLM's and llama.cpp's")
async def detokenize(call: ApiCall, body: DetokenizeBody) -> DetokenizeResponse:
    """Return the text of token ids."""
    if (body.token_ids is None) == (body.tokens is None):
        raise InvalidRequest("Send token_ids, or tokens, which is vLLM's and llama.cpp's name.", field="token_ids")
    ids = body.tokens if body.token_ids is None else body.token_ids
    text = await call.service.detokenize(ids or (), bool(body.skip_special_tokens))
    if body.token_ids is not None:
        return {"text": text}
    return {"content": text} if body.model is None else {"prompt": text}


@NATIVE.get("/tokenizer_info", "vLLM: the tokenizer's configuration and chat template", statuses=(400, 503))
async def tokenizer_info(call: ApiCall) -> TokenizerInfo:
    """Return the checkpoint's tokenizer_config.json, with the chat template."""
    tokenizer, model = _tokenizer(call.service), call.service.model
    template = model.chat.source if isinstance(model, ServedDecoder) and model.chat is not None else None
    info = {
        **tokenizer.config,
        **tokenizer.named_tokens,
        "tokenizer_class": str(tokenizer.config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        "chat_template": template,
    }
    return cast(TokenizerInfo, info)


def _tokenizer(service: Service) -> Tokenizer:
    model = service.model
    if isinstance(model, ServedProgram | ServedTasks):
        raise wrong_kind_error(model)
    return model.tokenizer
