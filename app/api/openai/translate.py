"""Translation of OpenAI's request bodies to the service's requests: messages, tools, schemas and parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from app.api.openai.schemas import (
    ChatBody,
    CompletionBody,
    FunctionDefinition,
    FunctionName,
    GenerationBody,
    Message,
    NamedToolChoice,
    ResponseFormat,
    ToolCallRecord,
)
from app.errors import InvalidRequest
from app.messages import ALL_LOGPROBS, MAX_BEAMS, GrammarKind, GrammarSource, SamplingParams
from app.service.requests import GenerationRequest, Infill, Picture, Tool, ToolUse
from app.text.chat import ChatOptions
from app.text.grammar_definition import MAX_CHOICES
from app.text.template_form import PICTURE

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
_NO_LIMIT = -1  # `max_tokens` of llama.cpp's and LM Studio's clients: up to the end of the context
MAX_TOTAL_CHOICES = 128  # prompts × n
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Defaults = Mapping[str, Any]


def chat_request(body: ChatBody, defaults: Defaults) -> GenerationRequest:
    """Return the service's request for a chat, without its id. `defaults` are the checkpoint's."""
    _check_stream_options(body)
    functions, use = _tool_use(body)
    options = ChatOptions(
        tools=tuple(functions) if use else (),
        documents=body.documents or (),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continues,
    )
    if options.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message cannot both be true.", field="continue_final_message"
        )
    return GenerationRequest(
        params=_chat_params(body, defaults),
        api="chat",
        request_id="",
        messages=tuple(template_message(message) for message in body.messages),
        template_arguments=body.template_arguments,
        chat_options=options,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncate_right=body.truncation_side == "right",
        clips_max_tokens=body.n_predict is not None,
        grammar=_grammar(body),
        tools=use,
        separates_reasoning=True,
        cache_salt=body.cache_salt,
        pictures=pictures_of(body.messages),
        thinking_budget=body.thinking_limit,
        source_lang=body.source_lang,
        target_lang=body.target_lang,
    )


def completion_requests(body: CompletionBody, defaults: Defaults) -> list[GenerationRequest]:
    """Return one request for each prompt of a completion, without their id."""
    _check_stream_options(body)
    params, grammar = _completion_params(body, defaults), _grammar(body)
    if len(body.prompt) * params.n > MAX_TOTAL_CHOICES:
        raise InvalidRequest(f"The number of prompts times n may be at most {MAX_TOTAL_CHOICES}.", field="n")
    return [
        GenerationRequest(
            params=params,
            api="completions",
            request_id="",
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            add_special_tokens=body.add_special_tokens is not False,
            echo=bool(body.echo),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncate_right=body.truncation_side == "right",
            clips_max_tokens=body.n_predict is not None,
            grammar=grammar,
            infill=Infill(body.suffix) if body.suffix else None,
            cache_salt=body.cache_salt,
            source_lang=body.source_lang,
            target_lang=body.target_lang,
        )
        for prompt in body.prompt
    ]


def _check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", field="stream_options")


# ---- parameters ----------------------------------------------------------------------------------------------------


def _chat_params(body: ChatBody, defaults: Defaults) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", field="top_logprobs")
    return body.params(
        defaults,
        max_tokens=_max_tokens(body, None, body.max_completion_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=_prompt_logprobs(body, None),
        logprob_token_ids=body.logprob_token_ids,
        **_beam_params(body, body.n or 1),
    )


def _max_tokens(body: GenerationBody, default: int | None, newer: int | None = None) -> int | None:
    """Return the limit of the completion under any of its names; None: up to the end of the context."""
    limits = {body.max_tokens, newer, body.n_predict} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens, max_completion_tokens and n_predict are the same limit: send one of them.", field="max_tokens"
        )
    limit = next(iter(limits), default)
    return None if limit == _NO_LIMIT or (body.n_predict is not None and body.n_predict < 0) else limit


def _completion_params(body: CompletionBody, defaults: Defaults) -> SamplingParams:
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise InvalidRequest(f"best_of must be at least n, which is {n}.", field="best_of")
    if best_of > n and body.stream and not body.use_beam_search:
        raise InvalidRequest("best_of greater than n cannot be streamed.", field="best_of")
    more: dict[str, Any] = {
        "max_tokens": _max_tokens(body, None if "max_tokens" in defaults else DEFAULT_COMPLETION_TOKENS),
        "logprob_token_ids": body.logprob_token_ids,
        "prompt_logprobs": _prompt_logprobs(body, _echoed_logprobs(body)),
    }
    if body.use_beam_search:
        return body.params(defaults, **more, logprobs=body.logprobs, **_beam_params(body, best_of))
    more |= _beam_params(body, best_of)
    logprobs = 0 if best_of > n and body.logprobs is None else body.logprobs
    return body.params(defaults, **more, logprobs=logprobs, n=None if body.n is None and best_of == 1 else best_of)


def _beam_params(body: GenerationBody, width: int) -> dict[str, Any]:
    """Return the parameters of a beam search of this width, if the body asks for one. A single beam is greedy."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty needs use_beam_search.", field="length_penalty")
        return {"beam_width": 1} if body.use_beam_search is False or next(_grammars(body), None) is not None else {}
    if width > MAX_BEAMS:
        raise InvalidRequest(f"A beam search has at most {MAX_BEAMS} beams, not {width}.", field="n")
    if next(_grammars(body), None) is not None:
        raise InvalidRequest("use_beam_search cannot be combined with structured output.", field="use_beam_search")
    return {"beam_width": width, "length_penalty": body.length_penalty, "temperature": 0.0}


def _echoed_logprobs(body: CompletionBody) -> int | None:
    """Return the number of most likely tokens at each place of an echoed prompt; None if it is not scored.

    Only a prompt that is scored may have no completion, so one without logprobs is scored too, and not shown.
    """
    if not body.echo:
        return None
    return 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs


def _prompt_logprobs(body: GenerationBody, echoed: int | None) -> int | None:
    """Return the number of most likely tokens at each place of the prompt; None if it is not scored."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not available in a stream: leave out stream.", field="prompt_logprobs")
    wanted = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return ALL_LOGPROBS if ALL_LOGPROBS in wanted else max(wanted, default=None)


# ---- structured output ---------------------------------------------------------------------------------------------


def _grammar(body: GenerationBody) -> GrammarSource | None:
    found = list(_grammars(body))
    if len(found) > 1:
        names = " and ".join(source.field for source in found)
        raise InvalidRequest(f"{names} cannot be combined: send one of them.", field=found[0].field)
    return found[0] if found else None


def _grammars(body: GenerationBody) -> Iterator[GrammarSource]:
    if body.response_format is not None and body.response_format.type != "text":
        yield _schema(_response_schema(body.response_format), "response_format")
    if body.json_schema is not None:
        yield _schema(body.json_schema, "json_schema")
    structured = body.structured_outputs
    given: list[tuple[str, GrammarKind, Any]] = [
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("grammar", "grammar", body.grammar or None),
    ]
    if structured is not None:
        schema = (
            structured.json_value if structured.json_value is not None or not structured.json_object else _ANY_OBJECT
        )
        given += [
            ("structured_outputs.json", "json_schema", schema),
            ("structured_outputs.regex", "regex", structured.regex),
            ("structured_outputs.choice", "choice", structured.choice),
            ("structured_outputs.grammar", "grammar", structured.grammar),
        ]
    for name, kind, value in given:
        if value is None:
            continue
        if kind == "choice" and len(value) > MAX_CHOICES:
            raise InvalidRequest(f"{name} takes at most {MAX_CHOICES} texts.", field=name)
        yield (
            _schema(value, name, is_open=structured is not None and structured.disable_additional_properties is False)
            if kind == "json_schema"
            else GrammarSource(kind, json.dumps(value) if kind == "choice" else value, name)
        )


def _schema(schema: Mapping[str, Any] | bool | str, name: str, is_open: bool = False) -> GrammarSource:
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):  # the compiler says what is wrong with text that is no JSON
            schema = json.loads(schema)
    return GrammarSource(
        "json_schema", schema if isinstance(schema, str) else json.dumps(schema), name, is_open=is_open
    )


def _response_schema(form: ResponseFormat) -> Mapping[str, Any] | bool:
    beside = form.object_schema if form.object_schema is not None else form.value
    if form.type == "json_object":
        return beside or _ANY_OBJECT
    if form.json_schema is None or form.json_schema.json_schema is None:
        if beside is not None:
            return beside
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema.schema.", field="response_format.json_schema"
        )
    return form.json_schema.json_schema


# ---- tools ---------------------------------------------------------------------------------------------------------


def _tool_use(body: ChatBody) -> tuple[list[dict[str, Any]], ToolUse | None]:
    """Return the functions as a template gets them, and the tools as the service gets them; None if none is used."""
    if body.functions is not None and body.tools is not None:
        raise InvalidRequest("functions is the older form of tools: send one of them.", field="functions")
    definitions = body.functions or _offered_functions(body)
    name = "functions" if body.functions is not None else "tools"
    if len({definition.name for definition in definitions}) < len(definitions):
        raise InvalidRequest(f"{name} must have different names.", field=name)
    choice = _forced_name(body)
    tools = {each.name: Tool(each.name, each.parameters or _NO_PARAMETERS) for each in definitions}
    if choice in ("", None) and (not tools or choice == ""):
        return [], None
    if not tools:
        raise InvalidRequest("tool_choice needs tools.", field="tool_choice")
    if choice is not None and choice != _ANY_TOOL and choice not in tools:
        raise InvalidRequest(f"tool_choice names {choice[:100]!r}, which is none of the tools.", field="tool_choice")
    forced = tuple(tools.values()) if choice == _ANY_TOOL else (tools[choice],) if choice else ()
    parallel = body.parallel_tool_calls is not False and body.functions is None and choice in (None, _ANY_TOOL)
    return [_template_tool(each) for each in definitions], ToolUse(tuple(tools.values()), forced, parallel)


def _offered_functions(body: ChatBody) -> tuple[FunctionDefinition, ...]:
    """Return the functions among the tools that the choice allows."""
    functions = tuple(tool.function for tool in body.tools or () if tool.is_offered and tool.function is not None)
    choice = body.tool_choice
    if not isinstance(choice, NamedToolChoice) or choice.allowed_tools is None:
        return functions
    allowed = {tool.function.name for tool in choice.allowed_tools.tools if tool.function is not None}
    if unknown := allowed - {function.name for function in functions}:
        raise InvalidRequest(
            f"tool_choice allows {min(unknown)[:100]!r}, which is none of the tools.", field="tool_choice"
        )
    return tuple(function for function in functions if function.name in allowed)


_ANY_TOOL = "\0"  # no function has this name


def _forced_name(body: ChatBody) -> str | None:
    """Return the name of the function that must be called, `_ANY_TOOL`, "" for none, or None for the model's choice."""
    for choice in (body.tool_choice, body.function_call):
        if choice is None or choice == "auto":
            continue
        if isinstance(choice, str):
            return _ANY_TOOL if choice == "required" else ""
        if isinstance(choice, FunctionName):
            return choice.name
        if choice.function is not None:
            return choice.function.name
        if choice.allowed_tools is not None and choice.allowed_tools.mode == "required":
            return _ANY_TOOL
    return None


def _template_tool(definition: FunctionDefinition) -> dict[str, Any]:
    function = {
        "name": definition.name,
        "description": definition.description or "",
        "parameters": definition.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


# ---- messages ------------------------------------------------------------------------------------------------------


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    The role `developer` becomes `system`: newer OpenAI models use the former name for the latter. The role `function`
    becomes `tool`, and a `function_call` one of `tool_calls`.
    """
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    content = message.content
    calls = message.tool_calls or ()
    if message.function_call is not None:
        calls = (*calls, ToolCallRecord(function=message.function_call))
    # Beside calls, a template may tell null from an empty text.
    converted: dict[str, Any] = {"role": role, "content": content or ("" if content == "" or not calls else None)}
    if isinstance(content, tuple):
        converted["content"] = [
            dict(PICTURE) if part.is_picture and message.has_pictures else {"type": "text", "text": part.shown}
            for part in message.parts
        ]
    given = {
        "name": message.name,
        "tool_calls": [_template_call(call, place) for place, call in enumerate(calls)] or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return converted | {name: value for name, value in given.items() if value is not None}


def pictures_of(messages: Sequence[Message]) -> tuple[Picture, ...]:
    """Return the pictures of a conversation in their order. Raises `InvalidRequest` for one that is none."""
    return tuple(
        part.picture(f"messages[{place}].content[{index}]")
        for place, message in enumerate(messages)
        if message.has_pictures
        for index, part in enumerate(message.parts)
        if part.is_picture
    )


def _template_call(call: ToolCallRecord, place: int) -> dict[str, Any]:
    function = {"name": call.called.name, "arguments": call.called.arguments or "{}"}
    return {"id": call.id or f"call_{place}", "type": "function", "function": function}
