"""Translation of Ollama's bodies to OpenAI's chat and completion bodies, and from there to the service's request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.api.ollama.schemas import OllamaChatBody, OllamaGenerateBody, OllamaGenerationBody, OllamaMessage, Options
from app.api.openai.schemas import (
    ChatBody,
    CompletionBody,
    FunctionCallText,
    FunctionDefinition,
    Message,
    ResponseFormat,
    ToolCallRecord,
    ToolDefinition,
)
from app.api.openai.translate import chat_request, completion_requests
from app.api.routing import ApiRuntime, sampling_defaults
from app.api.schemas import make_body
from app.errors import InvalidRequest
from app.service.requests import GenerationRequest
from app.service.served_model import ServedDecoder

_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def chat_generation(runtime: ApiRuntime, body: OllamaChatBody, identity: str) -> GenerationRequest | None:
    """Return the service's request for a chat; None if it has no messages."""
    if not body.messages:
        return None
    tools = tuple(
        ToolDefinition(
            type="function",
            function=FunctionDefinition(
                name=offered.name, description=offered.description, parameters=offered.parameters
            ),
        )
        for tool in body.tools or ()
        if (offered := tool.offered) is not None
    )
    messages = tuple(map(_message, body.messages))
    return _chat_generation(runtime, body, identity, messages, tools=tools)


def prompt_generation(runtime: ApiRuntime, body: OllamaGenerateBody, identity: str) -> GenerationRequest | None:
    """Return the service's request for a prompt: a chat, or with `raw` or without a chat template a completion.

    None if there is no prompt.
    """
    if not body.prompt:
        return None
    model = runtime.service.model
    has_template = isinstance(model, ServedDecoder) and model.chat is not None
    prompt = body.prompt
    if has_template and not body.raw:
        messages: tuple[Message, ...] = (Message(role="user", content=prompt),)
        if body.system:
            messages = (Message(role="system", content=body.system), *messages)
        return _chat_generation(runtime, body, identity, messages)
    if body.system:
        raise InvalidRequest(
            "system needs a chat template: leave raw out, or put the text into the prompt.", field="system"
        )
    completion = make_body(
        CompletionBody,
        prompt=prompt,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_shared_fields(body),
    )
    request = completion_requests(completion, identity, sampling_defaults(runtime))[0]
    # Without num_predict there is no limit, unlike with OpenAI.
    params = replace(request.params, max_tokens=completion.max_tokens)
    return _adapted(replace(request, params=params))


def _chat_generation(
    runtime: ApiRuntime, body: OllamaGenerationBody, identity: str, messages: tuple[Message, ...], **more: Any
) -> GenerationRequest:
    chat = make_body(
        ChatBody,
        messages=messages,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.template_arguments,
        **_shared_fields(body),
        **more,
    )
    return _adapted(chat_request(chat, identity, sampling_defaults(runtime)))


def _adapted(request: GenerationRequest) -> GenerationRequest:
    grammar = None if request.grammar is None else replace(request.grammar, field="format")
    return replace(request, api="ollama", grammar=grammar, clips_max_tokens=True)


def _shared_fields(body: OllamaGenerationBody) -> dict[str, Any]:
    fields = sampling_fields(body.options or Options()) | {"cache_salt": body.cache_salt}
    if isinstance(body.format, Mapping):
        return fields | {"json_schema": body.format}
    return fields | {"response_format": ResponseFormat(type="json_object") if body.format == "json" else None}


def sampling_fields(options: Options) -> dict[str, Any]:
    """Return the options as fields of OpenAI's bodies."""
    limit = options.num_predict
    return {name: getattr(options, name) for name in _SAME_OPTIONS} | {
        "max_tokens": None if limit is None or limit < 0 else limit,
        "repetition_penalty": options.repeat_penalty,
    }


def _message(message: OllamaMessage) -> Message:
    calls = tuple(
        ToolCallRecord(
            id=call.id, function=FunctionCallText(name=call.function.name, arguments=call.function.arguments)
        )
        for call in message.tool_calls or ()
    )
    return Message(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls or None,
        reasoning_content=message.thinking,
    )
