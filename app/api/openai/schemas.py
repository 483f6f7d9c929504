"""Bodies, responses and errors of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.openai.parts import MessagePart, MessageParts, refuse_unread
from app.api.schemas import (
    LEAVE_OUT,
    MAX_MESSAGES,
    OTHER_SAMPLERS,
    Body,
    Int64,
    Prompts,
    Refusal,
    SamplingFields,
    refused,
)
from app.errors import InvalidRequest
from app.messages import MAX_LOGPROB_TOKEN_IDS
from app.metrics.instruments import Api

MAX_TOOLS = 256
MAX_NAME = 128  # characters of a function's name
# Some clients send the flag as text.
Strict = bool | Literal["true", "false", "True", "False"]

USE_STRUCTURED_OUTPUTS = "use structured_outputs or response_format"
# Fields of vLLM, SGLang, llama.cpp and TGI that change the answer, with the values that request nothing. vllm-router and
# sglang-router parse a body and add these of SGLang with their defaults to every request.
REFUSED: Mapping[str, Refusal] = {
    **OTHER_SAMPLERS,
    **refused(
        LEAVE_OUT,
        no_stop_trim=False,
        return_hidden_states=False,
        separate_reasoning=True,
        stream_reasoning=True,
        early_stopping=False,
        logits_processors=([],),
        custom_logit_processor=(),
        stop_regex=([], ""),
        session_params=(),
        lora_path=(),
        adapter_id=(),
        prompt_embeds=(),
        mm_processor_kwargs=({},),
        multi_modal_data=({},),
        image_data=([],),
        audio_data=([],),
        video_data=([],),
    ),
    **refused(
        USE_STRUCTURED_OUTPUTS,
        regex=(),
        ebnf=(),
        structural_tag=(),
        guided_json_object=False,
        guided_whitespace_pattern=(),
        whitespace_pattern=(),
    ),
    **refused("use repetition_penalty", repeat_penalty=1.0),
    **refused("use max_tokens", max_new_tokens=(), max_output_tokens=(), num_predict=()),
    **refused("use use_beam_search", beam_width=1),
    **refused("use min_tokens", min_new_tokens=0),
    **refused("use stop", stop_sequences=([],)),
}


class StreamOptions(Body):
    """The `stream_options` object."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# ---- structured output ---------------------------------------------------------------------------------------------


class JsonSchemaFormat(Body):
    """The `json_schema` object of a response format."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Strict | None = None


class ResponseFormat(Body):
    """The `response_format` object. `schema` beside `json_object` is llama.cpp's form, `value` is TGI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None


JsonSchema = dict[str, Any] | str
Choices = Annotated[tuple[str, ...], Field(fail_fast=True, min_length=1)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs` object, with one of its fields.

    `disable_additional_properties` false: objects of a schema that lists their properties may have others.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(LEAVE_OUT, whitespace_pattern=(), structural_tag=())

    json_value: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None


# ---- tools ---------------------------------------------------------------------------------------------------------


class FunctionDefinition(Body):
    """A function that a model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Strict | None = None


class RequestTool(Body):
    """A tool of any dialect, which needs the field `REQUIRED` if it is offered to the model, and is else left out.

    Tools that a provider runs, or of other types, are not offered.
    """

    REQUIRED: ClassVar[str]
    type: str | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Note a tool that is left out as ignored, and refuse another one without its required field."""
        if not self.is_offered:
            self.leave_out(path, self.type, ignored)
            return
        if getattr(self, self.REQUIRED) is None:
            field = path + self.REQUIRED
            raise InvalidRequest(f"{field}: Field required.", field=field)
        super().check_fields(path, ignored)

    @property
    def is_offered(self) -> bool:
        """True for a function, which is also the type of a tool that names none."""
        return self.type in (None, "function")


class ToolDefinition(RequestTool):
    """A function, by its definition."""

    REQUIRED: ClassVar[str] = "function"
    function: FunctionDefinition | None = None


class FunctionName(Body):
    """A function by its name."""

    name: str


class AllowedFunction(Body):
    """A tool that may be called."""

    type: str | None = None
    function: FunctionName | None = None


class AllowedTools(Body):
    """The tools that may be called, or of which one must be called."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[tuple[AllowedFunction, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] = ()


class NamedToolChoice(Body):
    """The function that must be called, or the functions that may be (`allowed_tools`)."""

    type: Literal["function", "allowed_tools"] | None = None
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a choice without what its type needs."""
        needed = "allowed_tools" if self.type == "allowed_tools" else "function"
        if getattr(self, needed) is None:
            raise InvalidRequest(f"{path}{needed}: Field required.", field=f"{path}{needed}")
        super().check_fields(path, ignored)


class FunctionCallText(Body):
    """A call of a function in the history. `arguments` is the text of a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCallText(Body):
    """A call of a tool that takes a text."""

    name: str
    input: str | None = None


class ToolCallRecord(Body):
    """A tool call in the history. A call of a custom tool has `custom` with its name and input."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCallText | None = None
    custom: CustomCallText | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a call that calls nothing."""
        if self.function is None and self.custom is None:
            raise InvalidRequest(f"{path}function: Field required.", field=f"{path}function")
        super().check_fields(path, ignored)

    @property
    def called(self) -> FunctionCallText:
        """The name and the arguments. The text of a custom tool is the argument `input`."""
        if self.function is not None:
            return self.function
        assert self.custom is not None, "a call has a function or a custom tool"
        return FunctionCallText(name=self.custom.name, arguments={"input": self.custom.input or ""})


# ---- messages ------------------------------------------------------------------------------------------------------


class Message(Body):
    """One message of a conversation. `name` is passed to the chat template, which may or may not use it.

    `role` is system, developer, user, assistant, tool or function, or one that this model's template writes.

    A message of the assistant may have calls instead of content, or neither. A message of the role `tool` has the result
    of the call `tool_call_id`; `function` is its older form. What other servers write into their answers, and clients
    send back with the history, is ignored. With `prefix` (DeepSeek, Mistral) or `partial` (Moonshot, Alibaba) the answer
    continues the last message.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = refused("send parts of text", images=([],))

    role: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z][\w .:/-]*$")]
    content: str | MessageParts | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCallRecord, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCallText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    partial: bool | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse what the model would have to read and cannot, and a message without content that has no calls either."""
        super().check_fields(path, ignored)
        if self.is_answer:
            return
        if self.role not in ("tool", "function") and isinstance(self.content, tuple):
            refuse_unread(self.content, f"{path}content")
        if self.content is None or self.content == ():
            raise InvalidRequest(f"{path}content must be a string or a list of text parts.", field=f"{path}content")

    @property
    def is_answer(self) -> bool:
        """True for a message of the model."""
        return self.role == "assistant"

    @property
    def has_pictures(self) -> bool:
        """True if pictures of the message are read. Those of tools' results and answers are left out."""
        return self.role not in ("tool", "function", "assistant")

    @property
    def parts(self) -> tuple[MessagePart, ...]:
        """The parts that the model gets, if the content has parts: all, or those of its own messages that are text."""
        given = self.content if isinstance(self.content, tuple) else ()
        return tuple(part for part in given if part.is_text) if self.is_answer else given


# ---- generation ----------------------------------------------------------------------------------------------------


LogprobTokenIds = Annotated[tuple[Int64, ...], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)]


class GenerationBody(SamplingFields):
    """Fields common to chat completions and completions.

    `n_predict` is llama.cpp's name for `max_tokens`; below 0 it means up to the end of the context, as -1 does in the
    other names.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = REFUSED

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
    source_lang: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    target_lang: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    add_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ThinkingSwitch(Body):
    """The `thinking` object of DeepSeek's, GLM's and Moonshot's APIs."""

    type: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class ReasoningOptions(Body):
    """The `reasoning` object of the Responses API and of OpenRouter. Summaries are not made."""

    effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    max_tokens: Int64 | None = None
    enabled: bool | None = None


_NO_REASONING = ReasoningOptions()


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`. Without `max_tokens`, generation may continue to the end of the context.

    With `echo`, the answer begins with the last message, if that is the assistant's.
    """

    API: ClassVar[Api] = "chat"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED,
        **refused(
            LEAVE_OUT,
            modalities=(["text"],),
            audio=(),
            web_search_options=(),
            best_of=1,
            chat_template=(),
        ),
        **refused("send a message of the role system", system=("", []), instructions=""),
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
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    thinking_budget: Int64 | None = None
    thinking_token_budget: Int64 | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def thinking_limit(self) -> int | None:
        """The most tokens of reasoning, under any of its names; None: no limit, as is -1. Raises `InvalidRequest`."""
        nested = (self.chat_template_kwargs or {}).get("thinking_budget")
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
            "chat_template_kwargs.thinking_budget": nested if type(nested) is int else None,
        }
        name, limit = next(((name, value) for name, value in given.items() if value is not None), ("", -1))
        if limit < -1:
            raise InvalidRequest(f"{name} must be -1, which is no limit, or at least 0, not {limit}.", field=name)
        return None if limit == -1 else limit

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables of the chat template, under the names that `app/text/template_form.py` translates to the template's."""
        reasoning = self.reasoning or _NO_REASONING
        effort, switch = self.reasoning_effort or reasoning.effort, self.thinking
        if switch is None:
            switch = reasoning.enabled
        if isinstance(switch, ThinkingSwitch):
            switch = None if switch.type is None else switch.type != "disabled"
        enabled = switch if self.enable_thinking is None else self.enable_thinking
        wanted = {
            "enable_thinking": False if effort == "none" and enabled is None else enabled,
            "reasoning_effort": None if effort == "none" else effort,
            "thinking_budget": self.thinking_limit if self.thinking_budget is None else self.thinking_budget,
        }
        return {name: value for name, value in wanted.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        last = self.messages[-1]
        return bool(self.continue_final_message) or (last.is_answer and bool(last.prefix or last.partial))

    @property
    def echoed(self) -> str:
        """The text of the last message, with which the answer begins; empty without `echo`."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(part.shown for part in last.parts)


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`. Without `max_tokens` a completion has 16 tokens, as OpenAI's."""

    API: ClassVar[Api] = "completions"
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


class LoadAdapterBody(Body):
    """Body of `POST /v1/load_lora_adapter`. `lora_path` is a directory below the server's lora_root."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


# ---- errors --------------------------------------------------------------------------------------------------------


class OpenAIErrorDetail(TypedDict):
    """What was wrong: a sentence, OpenAI's kind of error, the field at fault, if any, and a stable code."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    """Error body of the OpenAI dialect."""

    error: OpenAIErrorDetail


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
OPENAI_ERRORS = ErrorFormat(_error_body, OpenAIError)


# ---- responses -----------------------------------------------------------------------------------------------------


class CachedTokens(TypedDict):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: int


class OpenAIUsage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class OpenAITokenLogprob(TypedDict):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredChatToken(OpenAITokenLogprob):
    """A sampled token and the most likely ones at its position."""

    top_logprobs: list[OpenAITokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat completion."""

    content: list[ScoredChatToken]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of a text completion, in parallel lists. A prompt's first token has null in their places."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """Score of a token at a place of the prompt. The most likely token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each token of the prompt: null for the first, then token ids with their scores.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(TypedDict):
    """A function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallBody(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    """More of a function call. The first part has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDeltaBody(TypedDict):
    """More of the tool call at `index`. The first part has the id and the type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class AssistantMessage(TypedDict):
    """The generated message. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]
    function_call: NotRequired[FunctionCall]


class MessageDelta(TypedDict):
    """The part of a message that a chunk adds. A choice's first chunk has the role, its last is empty."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDeltaBody]]
    function_call: NotRequired[FunctionCallDelta]


OpenAIFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(TypedDict):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    """A choice's part of a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None
    token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    """A choice of a text completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: OpenAIFinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class GeneratedObject(TypedDict):
    """Fields common to the responses and chunks of generation."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    prompt_token_ids: NotRequired[list[int] | None]


class ChatCompletion(GeneratedObject):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAIUsage
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class ChatCompletionChunk(GeneratedObject):
    """Event of a streamed chat completion. With `stream_options.include_usage`, the last one has the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class TextCompletion(GeneratedObject):
    """Response of `POST /v1/completions`, and event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[OpenAIUsage | None]


class InputTokenCount(TypedDict):
    """Response of the routes that count a prompt's tokens."""

    object: NotRequired[Literal["response.input_tokens"]]
    input_tokens: int


class ModelObject(TypedDict):
    """A served model. `root` is its first name, of which `id` may be an alias.

    `status` is llama.cpp's, if there are several models: `value` is unloaded, loading or loaded, and `failed` is there if
    it could not be loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: NotRequired[str]
    status: NotRequired[dict[str, Any]]


class ModelCapabilities(TypedDict):
    """What a loaded model can do, in llama.cpp's words."""

    name: str
    model: str
    capabilities: list[str]


class ModelList(TypedDict):
    """Response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelObject]
    models: list[ModelCapabilities]
