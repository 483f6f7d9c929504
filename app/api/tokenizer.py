"""Tokenizer routes in the native format, vLLM's, llama.cpp's and text-embeddings-inference's.

One route takes the bodies of all four.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from app.api.encoders.vectors import join_with_pauses
from app.api.openai.bodies import MAX_TOOLS, Message, ToolDefinition
from app.api.openai.translate import template_message
from app.api.routing import (
    BODY_ERRORS,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    answer_errors_as,
    check_model,
    runtime_of,
)
from app.api.schemas import MAX_MESSAGES, Body, TokenIds
from app.api.tei import TEI_ERRORS
from app.errors import InvalidRequest
from app.service.encode import MAX_TEXTS, named_prompt
from app.service.served_model import ServedDecoder, ServedProgram, wrong_kind_error
from app.text.chat import ChatOptions
from app.text.tokenizer import Tokenizer, TokenSpan

Json = dict[str, Any]
_IDS_AT_ONCE = 4096
MAX_PLACED_CHARACTERS = 2**20  # each may be a token, which has some 80 bytes in the response and 150 before it


class TokenizeBody(Body):
    """Body of `POST /tokenize`, with `prompt`, with `messages` that are rendered with the chat template, or llama.cpp's.

    llama.cpp's text is `content`; special tokens are added to it only with `add_special`. text-embeddings-inference's
    are `inputs`, with `prompt_name`.
    """

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "text": "send prompt here.",
        "ids": "send prompt here; /decode takes ids.",
        "input": "send prompt here.",
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    content: str | None = None
    inputs: str | Annotated[tuple[str, ...], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)] | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    returns_texts: bool | None = Field(None, alias="with_pieces")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[tuple[ToolDefinition, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """Body of `POST /detokenize`: `token_ids`, or `tokens` with vLLM's and llama.cpp's name.

    Special tokens stay in the text, as with these, unless `skip_special_tokens` is true.
    """

    model: str | None = None
    FOREIGN: ClassVar[Mapping[str, str]] = {"ids": "send token_ids here, or send ids to /decode."}

    token_ids: TokenIds | None = None
    tokens: TokenIds | None = None
    skip_special_tokens: bool | None = None


class TokenizeResponse(TypedDict):
    """Response of `POST /tokenize`.

    A body with `content` gets `tokens` alone, with `with_pieces` as objects of `id` and `piece`. Any other gets
    `token_ids` and `num_tokens`, and the same under vLLM's names.
    """

    token_ids: NotRequired[list[int]]
    num_tokens: NotRequired[int]
    tokens: list[Any]
    count: NotRequired[int]
    max_model_len: NotRequired[int]
    token_strs: NotRequired[list[str] | None]


class TokenPlace(TypedDict):
    """A token of text-embeddings-inference, with its characters [start, stop) in the text if it has any."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DetokenizeResponse(TypedDict, total=False):
    """Response of `POST /detokenize`: `text`; vLLM's `prompt` for `tokens` with a model; else llama.cpp's `content`."""

    text: str
    prompt: str
    content: str


class TokenizerInfo(TypedDict):
    """Response of `GET /tokenizer_info`: the checkpoint's tokenizer_config.json, with the chat template."""

    tokenizer_class: str


router = DialectRouter("Native")


@router.post(
    "/tokenize",
    summary="Token ids of a text or a chat; also vLLM's, llama.cpp's and text-embeddings-inference's",
    response_model=TokenizeResponse | list[list[TokenPlace]],
    responses=router.failures(*BODY_ERRORS, 404, also=TEI_ERRORS),
)
async def tokenize(request: Request, unread: RequestBody[TokenizeBody]) -> Response:
    """Serve `POST /tokenize`."""
    if await unread.has_field("inputs"):
        answer_errors_as(request, TEI_ERRORS)
    body = await unread.parse()
    runtime = runtime_of(request)
    check_model(runtime, body.model)
    if sum(source is not None for source in (body.prompt, body.messages, body.content, body.inputs)) != 1:
        raise InvalidRequest(
            "Send either prompt or messages, or llama.cpp's content, or text-embeddings-inference's inputs.",
            field="prompt",
        )
    if body.inputs is not None:
        return Response(await _tokens_with_places(runtime, body), media_type="application/json")
    if body.content is not None:
        _check_placed(body.content, bool(body.returns_texts), "content")
        ids = await runtime.service.tokenize(body.content, bool(body.add_special))
        tokens = (to_json(_token_body(_tokenizer(runtime), token_id)) for token_id in ids)
        listed = await (join_with_pauses(b"[", tokens, b"]") if body.returns_texts else _id_list(ids))
        return Response(b'{"tokens":%b}' % listed, media_type="application/json")
    _check_placed(body.prompt or "", bool(body.return_token_strs), "prompt")
    ids = await _prompt_ids(runtime, body)
    names = (to_json(_tokenizer(runtime).token_text(token_id)) for token_id in ids)
    strings = await join_with_pauses(b"[", names, b"]") if body.return_token_strs else b"null"
    listed, limit = await _id_list(ids), runtime.service.model.limits.max_model_len
    response = b'{"token_ids":%b,"num_tokens":%d,"tokens":%b,"count":%d,"max_model_len":%d,"token_strs":%b}'
    return Response(
        response % (listed, len(ids), listed, len(ids), limit, strings),
        media_type="application/json",
    )


async def _id_list(ids: list[int]) -> bytes:
    """Return a JSON list of token ids, between whose parts the event loop runs other tasks."""
    starts = range(0, len(ids), _IDS_AT_ONCE)
    return await join_with_pauses(b"[", (to_json(ids[start : start + _IDS_AT_ONCE])[1:-1] for start in starts), b"]")


def _check_placed(text: str, is_wanted: bool, field: str) -> None:
    """Check the length of a text whose tokens are wanted with their texts."""
    if is_wanted and len(text) > MAX_PLACED_CHARACTERS:
        raise InvalidRequest(
            f"{field} may have {MAX_PLACED_CHARACTERS} characters if the tokens' texts are wanted: send less, or ask for "
            "ids alone.",
            field=field,
        )


async def _prompt_ids(runtime: ApiRuntime, body: TokenizeBody) -> list[int]:
    service = runtime.service
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
    if not body.add_special_tokens:  # the template writes all special tokens
        return await service.tokenize_chat(messages, arguments, options)
    return await service.tokenize(await service.render_chat(messages, arguments, options))


async def _tokens_with_places(runtime: ApiRuntime, body: TokenizeBody) -> bytes:
    """Return text-embeddings-inference's response: the tokens of each text, and of the checkpoint's prompt before it."""
    texts = (body.inputs,) if isinstance(body.inputs, str) else body.inputs or ()
    if sum(map(len, texts)) > MAX_PLACED_CHARACTERS:
        raise InvalidRequest(
            f"inputs may have {MAX_PLACED_CHARACTERS} characters in total: send fewer, or send prompt for ids alone.",
            field="inputs",
        )
    prompt = "" if body.prompt_name is None else named_prompt(runtime.service.model, body.prompt_name)
    rows = []
    for text in texts:
        spans = await runtime.service.tokenize_spans(prompt + text, body.add_special_tokens is not False)
        tokens = (to_json(_token_place(_tokenizer(runtime), prompt + text, span)) for span in spans)
        rows.append(await join_with_pauses(b"[", tokens, b"]"))
    return await join_with_pauses(b"[", rows, b"]")


def _token_place(tokenizer: Tokenizer, text: str, span: TokenSpan) -> Json:
    return {
        "id": span.token_id,
        "text": tokenizer.token_text(span.token_id) if span.start is None else text[span.start : span.stop],
        "special": not tokenizer.has_text(span.token_id),
        "start": span.start,
        "stop": span.stop,
    }


def _token_body(tokenizer: Tokenizer, token_id: int) -> Json:
    """Return a token's id and text; bytes that are not whole characters as numbers."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": spelled.decode() or tokenizer.token_text(token_id)}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(spelled)}


@router.post(
    "/detokenize",
    summary="Text of token ids; also vLLM's and llama.cpp's",
    response_model=DetokenizeResponse,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def detokenize(request: Request, unread: RequestBody[DetokenizeBody]) -> Response:
    """Serve `POST /detokenize`."""
    body = await unread.parse()
    runtime = runtime_of(request)
    check_model(runtime, body.model)
    if (body.token_ids is None) == (body.tokens is None):
        raise InvalidRequest("Send token_ids, or tokens, which is vLLM's and llama.cpp's name.", field="token_ids")
    ids = body.tokens if body.token_ids is None else body.token_ids
    text = await runtime.service.detokenize(ids or (), bool(body.skip_special_tokens))
    name = "text" if body.token_ids is not None else "content" if body.model is None else "prompt"
    return JSONResponse({name: text})


@router.get(
    "/tokenizer_info",
    summary="vLLM: the tokenizer's configuration and chat template",
    response_model=TokenizerInfo,
    responses=router.failures(400, 503),
)
async def tokenizer_info(request: Request) -> Response:
    """Serve `GET /tokenizer_info`."""
    runtime = runtime_of(request)
    tokenizer, model = _tokenizer(runtime), runtime.service.model
    template = model.chat.source if isinstance(model, ServedDecoder) and model.chat is not None else None
    info: Json = {
        **tokenizer.config,
        **tokenizer.named_tokens,
        "tokenizer_class": str(tokenizer.config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        "chat_template": template,
    }
    return JSONResponse(info)


def _tokenizer(runtime: ApiRuntime) -> Tokenizer:
    model = runtime.service.model
    if isinstance(model, ServedProgram):
        raise wrong_kind_error(model)
    return model.tokenizer
