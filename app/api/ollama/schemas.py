"""Responses and errors of the Ollama dialect. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError


class OllamaError(TypedDict):
    """Error body of the Ollama dialect, and last line of a stream that fails."""

    error: str


def _error_body(error: HttpError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA_ERRORS = ErrorFormat(_error_body, OllamaError)


class OllamaStatus(TypedDict):
    """Line of a response of `POST /api/pull`."""

    status: str


class OllamaTokenLogprob(TypedDict):
    """A token with its log-probability, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class OllamaLine(TypedDict):
    """Fields of a response and of each line of a stream. The last line has `done` and the counts."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[OllamaTokenLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaAnswer(TypedDict):
    """A message of the assistant. The arguments of its calls are objects."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaChatResponse(OllamaLine):
    """Response of `POST /api/chat`, and line of a streamed one."""

    message: OllamaAnswer


class OllamaGenerateResponse(OllamaLine):
    """Response of `POST /api/generate`, and line of a streamed one."""

    response: str
    thinking: NotRequired[str]


class OllamaEmbedResponse(TypedDict):
    """Response of `POST /api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(TypedDict):
    """Response of `POST /api/embeddings`."""

    embedding: list[float]


class OllamaDetails(TypedDict):
    """Kind and size of the model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """The served model. `digest` identifies it; it is not the hash of a file."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: NotRequired[str]
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class OllamaModels(TypedDict):
    """Response of `GET /api/tags` and `GET /api/ps`."""

    models: list[OllamaModel]


class OllamaShow(TypedDict):
    """Response of `POST /api/show`."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """Response of `GET /api/version`."""

    version: str
