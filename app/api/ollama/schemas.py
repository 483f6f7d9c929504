"""Bodies, responses and errors of the Ollama dialect. Durations are in nanoseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.openai.schemas import MAX_NAME, MAX_TOOLS, ScoredChatToken
from app.api.schemas import (
    LEAVE_OUT,
    MAX_MESSAGES,
    MAX_PARTS,
    OTHER_SAMPLERS,
    Body,
    CacheSalt,
    Int64,
    Refusal,
    grammars_refused,
    refused,
)
from app.errors import InvalidRequest
from app.metrics.instruments import Api


class Options(Body):
    """The `options` object. `num_predict` below 0 means up to the end of the context; `top_k` 0 means all tokens.

    Options about memory, threads and the library are ignored. The context is the server's own, and the repetition
    penalty sees all of it.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = OTHER_SAMPLERS

    num_predict: Int64 | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Body):
    """A tool. Tools of other types than functions are left out."""

    type: str | None = None
    function: OllamaFunction | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Note a tool of another type as ignored, and refuse a function without its definition."""
        if self.function is None and self.type in (None, "function"):
            raise InvalidRequest(f"{path}function: Field required.", field=f"{path}function")
        if self.type not in (None, "function"):
            self.leave_out(path, self.type, ignored)
            return
        super().check_fields(path, ignored)

    @property
    def offered(self) -> OllamaFunction | None:
        """The function that is offered to the model; None for a tool of another type."""
        return self.function if self.type in (None, "function") else None


class CalledFunction(Body):
    """A call of a function in the history."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(Body):
    """A tool call in the history."""

    id: str | None = None
    function: CalledFunction


Images = Annotated[tuple[str, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class OllamaMessage(Body):
    """One message of a conversation. A message of the role `tool` has the result of the function `tool_name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[tuple[OllamaToolCall, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Images | None = None


_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION = re.compile(rf"-?(?:{_DURATION_PART.pattern})+")


class _ModelBody(Body):
    """Fields of all bodies. `keep_alive` has an effect where clients may unload models."""

    API: ClassVar[Api] = "ollama"

    model: str
    options: Options | None = None
    keep_alive: float | str | None = None

    @property
    def keep_seconds(self) -> float:
        """The seconds of `keep_alive`, negative for ever. Raises `InvalidRequest`."""
        try:
            return float(self.keep_alive or 0)
        except ValueError:
            pass
        text = str(self.keep_alive)
        if _DURATION.fullmatch(text) is None:
            raise InvalidRequest(
                "keep_alive must be a number of seconds or a duration such as 10m; 0 unloads the model, -1 keeps it.",
                field="keep_alive",
            )
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
        return -seconds if text.startswith("-") else seconds


class OllamaGenerationBody(_ModelBody):
    """Fields common to chat and generate. Both stream unless `stream` is false."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **refused("use options", temperature=(), top_p=(), top_k=(), seed=(), stop=(), num_predict=(), max_tokens=()),
        **grammars_refused("use format"),
    }

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    cache_salt: CacheSalt | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template for `think`: names of Qwen's, Granite's and gpt-oss's templates."""
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"enable_thinking": True, "thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think, "thinking": self.think}


class OllamaChatBody(OllamaGenerationBody):
    """Body of `POST /api/chat`. Without messages it only asks for the model to be loaded."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OllamaGenerationBody.REFUSED,
        **refused("send a message of the role system", system=""),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {"prompt": "send messages here, or send prompt to /api/generate."}

    messages: Annotated[tuple[OllamaMessage, ...], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[tuple[OllamaTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaGenerationBody):
    """Body of `POST /api/generate`. The prompt is a user's message, or with `raw` the text that is continued."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OllamaGenerationBody.REFUSED,
        **refused(LEAVE_OUT, suffix="", template="", context=([],)),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {"messages": "send prompt here, or send messages to /api/chat."}

    prompt: str | None = None
    images: Images | None = None
    system: str | None = None
    raw: bool | None = None


OllamaTexts = str | Annotated[tuple[str, ...], Field(fail_fast=True)]


class OllamaEmbedBody(_ModelBody):
    """Body of `POST /api/embed`. Long texts are truncated unless `truncate` is false."""

    input: OllamaTexts
    truncate: bool | None = None
    dimensions: Int64 | None = None


class OllamaEmbeddingsBody(_ModelBody):
    """Body of `POST /api/embeddings`, the older form of `/api/embed`."""

    prompt: str


class NameBody(Body):
    """Body of `POST /api/show` and `/api/pull`: the name of a model, also under its older name."""

    API: ClassVar[Api] = "ollama"

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    @property
    def wanted(self) -> str:
        """The name. Raises `InvalidRequest` if there is none."""
        name = self.model or self.name
        if name is None:
            raise InvalidRequest("model: Field required.", field="model")
        return name


class OllamaError(TypedDict):
    """Error body of the Ollama dialect, and last line of a stream that fails."""

    error: str


def _error_body(error: HttpError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA_ERRORS = ErrorFormat(_error_body, OllamaError)


class OllamaStatus(TypedDict):
    """Line of a response of `POST /api/pull`."""

    status: str


class OllamaLine(TypedDict):
    """Fields of a response and of each line of a stream. The last line has `done` and the counts."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[ScoredChatToken]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaCalled(TypedDict):
    """A function to call. Its arguments are an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A call of a tool."""

    id: str
    function: OllamaCalled


class OllamaAnswer(TypedDict):
    """A message of the assistant. The arguments of its calls are objects."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


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
