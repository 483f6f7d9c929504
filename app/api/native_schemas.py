"""What bodies of our own routes look like: the smallest surface, with token ids in and out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.api.openai_schemas import Message
from app.api.schemas import MAX_MESSAGES, Body, Int, SamplingFields, TokenIds


class GenerateBody(SamplingFields):
    """`POST /generate`, with `prompt` or `token_ids`. Without `max_tokens` an answer may go on to the end of the context.

    `add_special_tokens` is about `prompt`: whether the tokenizer puts its own (such as a beginning of sequence) around it.
    """

    prompt: str | None = None
    token_ids: TokenIds | None = None
    max_tokens: Int | None = None
    logprobs: Int | None = None
    beam_width: Int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None


class TokenizeBody(Body):
    """`POST /tokenize`, with `prompt`, or with `messages` that go through the chat template."""

    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    token_ids: TokenIds
    skip_special_tokens: bool | None = None
