"""Bodies, responses and errors of the llama.cpp dialect."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.schemas import (
    LEAVE_OUT,
    MAX_PARTS,
    MAX_PROMPTS,
    OPENAI_ONLY,
    OTHER_SAMPLERS,
    Body,
    Int64,
    Refusal,
    SamplingFields,
    refused,
)
from app.errors import UnsupportedParameter
from app.messages import MAX_LOGIT_BIASES
from app.metrics.instruments import Api


@dataclass(frozen=True, slots=True)
class PromptWithPictures:
    """A text with `MEDIA_MARKER` for each picture, and these, in base64."""

    text: str
    pictures: tuple[str, ...]


# A prompt is a text, token ids, or texts and ids in one sequence.
PromptParts = str | tuple[str | int, ...] | PromptWithPictures


def _validate_prompts(value: Any, max_prompts: int = MAX_PROMPTS) -> tuple[PromptParts, ...]:
    """Return the prompts. A list with an id in it is one prompt; any other list has one prompt in each place."""
    if isinstance(value, str | dict):
        return (_validate_prompt(value),)
    if isinstance(value, list) and value and int in set(map(type, value)):
        return (_validate_parts(value),)
    if isinstance(value, list) and 0 < len(value) <= max_prompts:
        return tuple(_validate_prompt(one) for one in value)
    number = "" if max_prompts == sys.maxsize else f"1 to {max_prompts} of "
    raise ValueError(
        f"Input should be a string, a list of strings and token ids, or a list of {number}these, not empty"
    )


def _validate_inputs(value: Any) -> tuple[PromptParts, ...]:
    """Return the inputs of an encoder, which checks their number itself."""
    inputs = _validate_prompts(value, sys.maxsize)
    if any(isinstance(one, PromptWithPictures) for one in inputs):
        raise ValueError("Input objects should have no multimodal_data: an encoder reads no pictures")
    mixed = [one for one in inputs if isinstance(one, tuple) and str in set(map(type, one))]
    if sum(isinstance(part, str) for one in mixed for part in one) > MAX_PARTS:  # each is tokenized apart
        raise ValueError(f"Input should have at most {MAX_PARTS} strings next to token ids")
    return inputs


def _validate_prompt(value: Any) -> PromptParts:
    """Return one prompt. An object has it as `prompt_string`, with pictures, or as parts of `content`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return _validate_parts(value)
    text, pictures = value.get("prompt_string"), value.get("multimodal_data") or []
    if isinstance(text, str) and isinstance(pictures, list) and set(map(type, pictures)) <= {str}:
        return PromptWithPictures(text, tuple(pictures)) if pictures else text
    content = value.get("content")
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    raise ValueError(
        'Input objects should be {"prompt_string": "…", "multimodal_data": ["BASE64"]} or'
        ' {"content": [{"type": "text", "text": "…"}]}'
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _validate_parts(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, list) or not value or not set(map(type, value)) <= {str, int}:
        raise ValueError("Input should be a list of strings and token ids, not empty")
    if sum(isinstance(part, str) for part in value) > MAX_PARTS:  # each is tokenized apart
        raise ValueError(f"Input should have at most {MAX_PARTS} strings in one prompt")
    return tuple(value)


_PARTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
_ONE = [{"type": "string"}, {"type": "object"}, _PARTS]
_SCHEMA = WithJsonSchema({"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}}]})
LlamaCppPrompts = Annotated[Any, AfterValidator(_validate_prompts), _SCHEMA]
LlamaCppInputs = Annotated[Any, AfterValidator(_validate_inputs), _SCHEMA]


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


class ImageData(Body):
    """A picture in base64. The prompt has `[img-ID]` in its place."""

    data: str
    id: Int64


class LlamaCppBody(SamplingFields):
    """Body of `POST /completion`. `n_predict` below 0 means up to the end of the context.

    Pictures are in `prompt.multimodal_data`, or in the older form `image_data`.
    `model` may name an adapter; other names mean the model, as llama.cpp does.
    """

    API: ClassVar[Api] = "llama_cpp"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **OPENAI_ONLY,
        **refused(LEAVE_OUT, t_max_predict_ms=(0, -1), lora=([],)),
        **refused('use prompt: {"prompt_string": "…", "multimodal_data": […]}', multimodal_data=([],)),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "messages": "send prompt here, or send messages to /v1/chat/completions.",
        "inputs": "send prompt here.",
    }

    model: str | None = None
    prompt: LlamaCppPrompts
    image_data: Annotated[tuple[ImageData, ...], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
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

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        super().check_fields(path, ignored)
        if self.image_data:
            raise UnsupportedParameter("image_data is not supported here: code has no pictures.", field="image_data")


class TopToken(TypedDict):
    """A likely token, with its probability after sampling, or its log-probability."""

    id: int
    token: str
    bytes: list[int]
    prob: NotRequired[float]
    logprob: NotRequired[float]


class LlamaCppToken(TopToken):
    """A token and the most likely ones at its position, with either kind of probability."""

    top_probs: NotRequired[list[TopToken]]
    top_logprobs: NotRequired[list[TopToken]]


class SettingsBias(TypedDict):
    """The bias of a token; null is minus infinity."""

    token: int
    bias: float | None


class SamplingSettings(TypedDict):
    """Sampling parameters as they are used."""

    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    logit_bias: list[SettingsBias]
    ignore_eos: bool
    n_probs: int


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
    completion_probabilities: NotRequired[list[LlamaCppToken]]
    model: NotRequired[str]
    generation_settings: NotRequired[SamplingSettings]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    stop_type: NotRequired[str]
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    timings: NotRequired[LlamaCppTimings]


class HealthStatus(TypedDict):
    """Response of `/health` and `/ping` when the server is ready."""

    status: str


class ServerVersion(TypedDict):
    """Response of `/version`."""

    version: str


class DefaultSettings(TypedDict):
    """Sampling parameters of a request that gives none, and the context of one request."""

    params: SamplingSettings
    n_ctx: int


class ModelNameBody(Body):
    """Body of `/models/load` and `/models/unload`."""

    API: ClassVar[Api] = "llama_cpp"

    model: str


class ControlledModel(TypedDict):
    """Response of `/models/load` and `/models/unload`."""

    success: bool


class ServerProperties(TypedDict):
    """Response of `/props`."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    media_marker: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(TypedDict):
    """A place for a running request."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class RenderedPrompt(TypedDict):
    """Response of `/apply-template`."""

    prompt: str


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
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


LLAMA_CPP_ERRORS = ErrorFormat(_error_body, LlamaCppError)
