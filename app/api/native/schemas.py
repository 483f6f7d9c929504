"""Bodies and responses of the native dialect: generation, and the tokenizer's routes, which are vLLM's and others' too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.openai.schemas import MAX_TOOLS, Message, ToolDefinition
from app.api.schemas import (
    LEAVE_OUT,
    MAX_MESSAGES,
    OPENAI_ONLY,
    OTHER_SAMPLERS,
    Body,
    Int64,
    Refusal,
    SamplingFields,
    TokenIds,
    refused,
)
from app.messages import FinishReason
from app.service.encode import MAX_TEXTS


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
