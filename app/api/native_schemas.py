"""Request bodies of the native routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.api.openai_schemas import Message
from app.api.schemas import MAX_MESSAGES, Body, Int, SamplingFields, TokenIds


class GenerateBody(SamplingFields):
    """Body of `POST /generate`, with `prompt` or `token_ids`.

    Without `max_tokens`, generation may continue to the end of the context. `add_special_tokens` applies to
    `prompt`: it makes the tokenizer add its own special tokens, such as the beginning of sequence.
    """

    prompt: str | None = None
    token_ids: TokenIds | None = None
    max_tokens: Int | None = None
    logprobs: Int | None = None
    beam_width: Int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None


class TokenizeBody(Body):
    """Body of `POST /tokenize`, with `prompt`, or with `messages` that are rendered with the chat template."""

    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    token_ids: TokenIds
    skip_special_tokens: bool | None = None
