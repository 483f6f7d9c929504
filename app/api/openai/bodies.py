"""Request bodies of the OpenAI dialect: supported fields, ignored fields, and fields that must be neutral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.api.schemas import MAX_MESSAGES, MAX_PARTS, Body, Int64, Prompts, SamplingFields
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import MAX_LOGPROB_TOKEN_IDS

MAX_TOOLS = 256
MAX_NAME = 128  # characters of a function's name

# Fields for labels, billing and storage at OpenAI, and hints that another server may follow. They change no answer here.
_IGNORED_AT_OPENAI = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity "
    "reasoning_effort"
)
# The same of vLLM and llama.cpp: ids, caches, and the library that follows a grammar.
_IGNORED_ELSEWHERE = (
    "request_id cache_salt cache_prompt id_slot guided_decoding_backend spaces_between_special_tokens timings_per_token"
)
IGNORED = frozenset(f"{_IGNORED_AT_OPENAI} {_IGNORED_ELSEWHERE}".split())
# Fields of vLLM, SGLang and llama.cpp with the values that request nothing. vllm-router and sglang-router parse a body and
# add these of SGLang with their defaults to every request.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "early_stopping": (False,),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "repeat_penalty": (1.0,),
    "return_progress": (False,),
    "verbose": (False,),
}


class StreamOptions(Body):
    """The `stream_options` object."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# ---- structured output ---------------------------------------------------------------------------------------------


class JsonSchemaFormat(Body):
    """The `json_schema` object of a response format."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The `response_format` object. `schema` beside `json_object` is llama.cpp's form, `value` is TGI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None


JsonSchema = dict[str, Any] | str
Choices = Annotated[tuple[str, ...], Field(fail_fast=True, min_length=1)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs` object, with one of its fields."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"disable_fallback", "disable_any_whitespace"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_value: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


# ---- tools ---------------------------------------------------------------------------------------------------------


class FunctionDefinition(Body):
    """A function that a model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class FunctionCallText(Body):
    """A call of a function in the history. `arguments` is the text of a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallRecord(Body):
    """A tool call in the history."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallText


# ---- messages ------------------------------------------------------------------------------------------------------

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text"})


class MessagePart(Body):
    """One part of a message; only text parts are supported."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control", "id", "logprobs"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": ([],)}

    type: str
    text: str | None = None
    refusal: str | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse parts that are no text, by their type."""
        if self.type in _TEXT_PARTS and self.text is None:
            raise InvalidRequest(f"{path}text: Field required.", field=f"{path}text")
        if self.type not in _TEXT_PARTS and (self.type != "refusal" or self.refusal is None):
            place = path.removesuffix(".")
            raise UnsupportedParameter(
                f"{place} is of type {self.type[:40]!r}; this server's models read text, and neither images nor audio "
                'nor files: send parts of the form {"type": "text", "text": "…"}.',
                field=place,
            )
        super().refuse_unknown(path)

    @property
    def shown(self) -> str:
        """The text of the part."""
        return (self.text if self.type != "refusal" else self.refusal) or ""


class Message(Body):
    """One message of a conversation. `name` is passed to the chat template, which may or may not use it.

    A message of the assistant may have calls instead of content. A message of the role `tool` has the result of the call
    `tool_call_id`; `function` is its older form.
    """

    # Fields of a response message that a client sends back as part of the history.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"refusal": ("",), "audio": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[tuple[MessagePart, ...], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCallRecord, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCallText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def refuse_unknown(self, path: str = "") -> None:
        """Refuse unknown fields, and a message without content that has no calls either."""
        super().refuse_unknown(path)
        has_calls = self.role == "assistant" and (self.tool_calls or self.function_call)
        if (self.content is None or self.content == ()) and not has_calls:
            wanted = "a string or a list of text parts"
            reason = " (null is for an assistant's message with tool_calls)" if self.role == "assistant" else ""
            raise InvalidRequest(f"{path}content must be {wanted}{reason}.", field=f"{path}content")


# ---- generation ----------------------------------------------------------------------------------------------------


LogprobTokenIds = Annotated[tuple[Int64, ...], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)]


class GenerationBody(SamplingFields):
    """Fields common to chat completions and completions.

    `n_predict` is llama.cpp's name for `max_tokens`; below 0 it means up to the end of the context.
    """

    IGNORED: ClassVar[frozenset[str]] = IGNORED
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    model: str | None = None
    max_tokens: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Int64 | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    n_predict: Int64 | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    add_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`. Without `max_tokens`, generation may continue to the end of the context.

    With `echo`, the answer begins with the last message, if that is the assistant's.
    """

    IGNORED: ClassVar[frozenset[str]] = IGNORED - {"reasoning_effort"}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL,
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "best_of": (1,),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "prompt": "send messages here, or send prompt to /v1/completions.",
        "input": "send messages here, or send input to /v1/responses.",
        "inputs": "send messages here.",
    }

    messages: Annotated[tuple[Message, ...], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tools: Annotated[tuple[ToolDefinition, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[tuple[FunctionDefinition, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    documents: Annotated[tuple[dict[str, Any], ...], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables of the chat template. Templates know an effort, or only whether the model thinks."""
        effort = self.reasoning_effort
        wanted: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
        return (wanted if effort is not None else {}) | (self.chat_template_kwargs or {})

    @property
    def echoed(self) -> str:
        """The text of the last message, with which the answer begins; empty without `echo`."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(part.shown for part in last.content)


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`. Without `max_tokens` a completion has 16 tokens, as OpenAI's."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "messages": "send prompt here, or send messages to /v1/chat/completions.",
        "input": "send prompt here, or send input to /v1/responses.",
        "inputs": "send prompt here.",
    }

    prompt: Prompts
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
