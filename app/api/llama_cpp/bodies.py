"""Request body and errors of the llama.cpp dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.llama_cpp.prompts import LlamaCppPrompts
from app.api.schemas import (
    LEAVE_OUT,
    MAX_PARTS,
    OPENAI_ONLY,
    OTHER_SAMPLERS,
    Body,
    Int64,
    Refusal,
    SamplingFields,
    refused,
)
from app.messages import MAX_LOGIT_BIASES
from app.metrics.instruments import Api


def _validate_biases(value: Any) -> tuple[tuple[int | str, float | Literal[False]], ...]:
    """Return pairs of a token and its bias, from a list of pairs or from OpenAI's object."""
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    if not isinstance(pairs, list) or len(pairs) > MAX_LOGIT_BIASES:
        raise ValueError(f"Input should be a list of at most {MAX_LOGIT_BIASES} pairs of a token and a number")
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) in (int, str)
        if not is_pair or not (pair[1] is False or type(pair[1]) in (int, float)):
            raise ValueError("Input should be a list of pairs of a token (id or text) and a number or false")
    return tuple((token, bias) for token, bias in pairs)


TokenBiases = Annotated[
    Any,
    AfterValidator(_validate_biases),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "array"}}, {"type": "object"}, {"type": "null"}]}),
]


class LlamaCppBody(SamplingFields):
    """Body of `POST /completion`. `n_predict` below 0 means up to the end of the context.

    `model` may name an adapter; other names mean the model, as llama.cpp does.
    """

    API: ClassVar[Api] = "llama_cpp"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **OPENAI_ONLY,
        **refused(LEAVE_OUT, t_max_predict_ms=(0, -1), lora=([],), image_data=([],), multimodal_data=([],)),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "messages": "send prompt here, or send messages to /v1/chat/completions.",
        "inputs": "send prompt here.",
    }

    model: str | None = None
    prompt: LlamaCppPrompts
    n_predict: Int64 | None = None
    max_tokens: Int64 | None = None
    stream: bool | None = None
    repeat_penalty: float | None = None
    logit_bias: TokenBiases = None
    n_probs: Int64 | None = None
    post_sampling_probs: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: tuple[str, ...] | None = None


class InfillFile(Body):
    """Another file of the same project."""

    filename: str | None = None
    text: str


class InfillBody(LlamaCppBody):
    """Body of `POST /infill`: what comes before the gap, which ends with `prompt`, and what comes after it."""

    prompt: str = ""
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[tuple[InfillFile, ...], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None


# ---- errors --------------------------------------------------------------------------------------------------------


class LlamaCppErrorDetail(TypedDict):
    """What was wrong: the status, a sentence, and llama.cpp's kind of error."""

    code: int
    message: str
    type: str


class LlamaCppError(TypedDict):
    """Error body of the llama.cpp dialect."""

    error: LlamaCppErrorDetail


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the error body."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


LLAMA_CPP_ERRORS = ErrorFormat(error_body, LlamaCppError)
