"""Request bodies of the Ollama dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.api.openai.bodies import MAX_NAME, MAX_TOOLS
from app.api.schemas import MAX_MESSAGES, Body, Int64
from app.errors import UnsupportedParameter

# Options about memory, threads and the library: they change no answer here. The context is the server's own, and the
# repetition penalty sees all of it.
_IGNORED_OPTIONS = frozenset(
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread numa low_vram use_mmap use_mlock f16_kv logits_all "
    "vocab_only embedding_only repeat_last_n penalize_newline mirostat_tau mirostat_eta draft_num_predict".split()
)


class Options(Body):
    """The `options` object. `num_predict` below 0 means up to the end of the context; `top_k` 0 means all tokens."""

    IGNORED: ClassVar[frozenset[str]] = _IGNORED_OPTIONS
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mirostat": (0,), "tfs_z": (1.0,), "typical_p": (1.0,)}

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

    IGNORED: ClassVar[frozenset[str]] = frozenset({"strict"})

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class CalledFunction(Body):
    """A call of a function in the history."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})

    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(Body):
    """A tool call in the history."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type"})

    id: str | None = None
    function: CalledFunction


class _ImagesRefused(Body):
    """A body that may have images, which are refused by name."""

    images: list[Any] | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse images, and unknown fields."""
        if self.images:
            raise UnsupportedParameter(
                f"{path}images: this server's models read text, and no images: leave them out.", field=f"{path}images"
            )
        super().refuse_unknown(path)


class OllamaMessage(_ImagesRefused):
    """One message of a conversation. A message of the role `tool` has the result of the function `tool_name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[tuple[OllamaToolCall, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _ModelBody(Body):
    """Fields of all bodies. The model stays loaded whatever `keep_alive` says."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    model: str
    options: Options | None = None


class OllamaGenerationBody(_ModelBody):
    """Fields common to chat and generate. Both stream unless `stream` is false."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"keep_alive", "truncate", "shift"})

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
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

    messages: Annotated[tuple[OllamaMessage, ...], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[tuple[OllamaTool, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaGenerationBody, _ImagesRefused):
    """Body of `POST /api/generate`. The prompt is a user's message, or with `raw` the text that is continued."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "template": ("",), "context": ([],)}

    prompt: str | None = None
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


class ShowBody(Body):
    """Body of `POST /api/show`."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"verbose"})

    model: str | None = None
    name: str | None = None
