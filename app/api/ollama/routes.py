"""Ollama dialect: chat, generate and embeddings, and the model, which is always loaded. Lines of JSON are the default."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from app.api.encoders.vectors import join_with_pauses, to_json_list
from app.api.ollama.schemas import (
    OLLAMA_ERRORS,
    NameBody,
    OllamaAnswer,
    OllamaCall,
    OllamaCalled,
    OllamaChatBody,
    OllamaChatResponse,
    OllamaDetails,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateBody,
    OllamaGenerateResponse,
    OllamaGenerationBody,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaShow,
    OllamaStatus,
    OllamaVersion,
    Options,
)
from app.api.openai.output import chat_logprobs
from app.api.openai.parts import MessagePart
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
from app.api.routing import (
    MESSAGES,
    ApiCall,
    ApiRuntime,
    Dialect,
    Encoding,
    Reply,
    check_model,
    known_model,
    sampling_defaults,
    served_names,
)
from app.api.schemas import make_body
from app.api.streaming import (
    NDJSON,
    SLOT,
    CollectedCall,
    CollectedChoice,
    CollectedCompletion,
    EventEncoding,
    Generation,
    GenerationStream,
    format_line,
    json_string,
    write_directly,
)
from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import FinishReason
from app.service.requests import (
    Accepted,
    ChoiceFinished,
    Encoded,
    EncodingRequest,
    GenerationRequest,
    ScoredToken,
    TextDelta,
    Truncation,
)
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, to_numpy
from app.version import VERSION

LineT = TypeVar("LineT", OllamaChatResponse, OllamaGenerateResponse)
_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def chat_generation(runtime: ApiRuntime, body: OllamaChatBody) -> GenerationRequest | None:
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
    return _chat_generation(runtime, body, messages, tools=tools)


def prompt_generation(runtime: ApiRuntime, body: OllamaGenerateBody) -> GenerationRequest | None:
    """Return the service's request for a prompt; None if there is none.

    It is a chat, or with `raw` or without a chat template a completion.
    """
    if not body.prompt:
        return None
    model = runtime.service.model
    has_template = isinstance(model, ServedDecoder) and model.chat is not None
    prompt = body.prompt
    if body.images and (not has_template or body.raw):
        raise UnsupportedParameter("images need a chat template, and no raw prompt.", field="images")
    if has_template and not body.raw:
        messages: tuple[Message, ...] = (Message(role="user", content=_with_images(prompt, body.images)),)
        if body.system:
            messages = (Message(role="system", content=body.system), *messages)
        return _chat_generation(runtime, body, messages)
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
    request = completion_requests(completion, sampling_defaults(runtime))[0]
    # Without num_predict there is no limit, unlike with OpenAI.
    params = replace(request.params, max_tokens=completion.max_tokens)
    return _adapted(replace(request, params=params))


def _chat_generation(
    runtime: ApiRuntime, body: OllamaGenerationBody, messages: tuple[Message, ...], **more: Any
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
    return _adapted(chat_request(chat, sampling_defaults(runtime)))


def _adapted(request: GenerationRequest) -> GenerationRequest:
    grammar = None if request.grammar is None else replace(request.grammar, field="format")
    return replace(request, grammar=grammar, clips_max_tokens=True)


def _shared_fields(body: OllamaGenerationBody) -> dict[str, Any]:
    fields = sampling_fields(body.options or Options()) | {"cache_salt": body.cache_salt}
    if isinstance(body.format, Mapping):
        return fields | {"json_schema": body.format}
    return fields | {"response_format": ResponseFormat(type="json_object") if body.format == "json" else None}


def sampling_fields(options: Options) -> dict[str, Any]:
    limit = options.num_predict
    return {name: getattr(options, name) for name in _SAME_OPTIONS} | {
        "max_tokens": None if limit is None or limit < 0 else limit,
        "repetition_penalty": options.repeat_penalty,
    }


def _with_images(text: str, images: Sequence[str] | None) -> str | tuple[MessagePart, ...]:
    """Return a text after its images, where Ollama puts them."""
    if not images:
        return text
    parts = [MessagePart(type="image_url", image_url=f"data:;base64,{data}") for data in images]
    return (*parts, MessagePart(type="text", text=text))


def _message(message: OllamaMessage) -> Message:
    calls = tuple(
        ToolCallRecord(
            id=call.id, function=FunctionCallText(name=call.function.name, arguments=call.function.arguments)
        )
        for call in message.tool_calls or ()
    )
    return Message(
        role=message.role,
        content=_with_images(message.content or "", message.images),
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls or None,
        reasoning_content=message.thinking,
    )


# Ollama has no reason for a timeout. Like the end of the context, it is a limit that cut the text short.
_DONE_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "timeout": "length",
    "aborted": "stop",
    "tool_calls": "stop",
}


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class _OllamaFormat(Generic[LineT]):
    """Formatter of one response: a chat with its text in a message, or a prompt's completion."""

    def __init__(self, model: str) -> None:
        self._model, self._began = model, time.monotonic()

    def _line(self, text: str, reasoning: str = "", calls: list[OllamaCall] | None = None) -> LineT:
        raise NotImplementedError

    def loaded(self, unloads: bool) -> LineT:
        """Return the response to a request that only asks for the model to be loaded, or unloaded."""
        line = self._line("")
        line["done"], line["done_reason"] = True, "unload" if unloads else "load"
        return line

    def whole(self, completion: CollectedCompletion) -> LineT:
        choice = completion.choices[0]
        assert choice.finished is not None, "a complete response has finished"
        line = self._line(choice.text, choice.reasoning, _calls(choice.tool_calls))
        return self._ended(_scored(line, choice.logprobs), choice.finished)

    async def events(self, stream: GenerationStream) -> AsyncIterator[LineT]:
        """Yield the stream's lines. Calls are whole, and the last line has the counts."""
        calls = CollectedChoice(0)
        async for event in stream:
            if isinstance(event, Accepted):
                continue
            if isinstance(event, TextDelta):
                calls.add(replace(event, text="", token_ids=(), logprobs=(), reasoning=""))
                if event.text or event.reasoning:
                    yield _scored(self._line(event.text, event.reasoning), event.logprobs)
                    plain = self._line(SLOT)
                    plain["created_at"] = SLOT
                    write_directly(
                        stream, plain, lambda text, ids: (json_string(timestamp(time.time())), json_string(text))
                    )
                continue
            if found := _calls(calls.tool_calls):
                yield self._line("", calls=found)
            yield self._ended(self._line(""), event)

    def _ended(self, line: LineT, finished: ChoiceFinished) -> LineT:
        line["done"], line["done_reason"] = True, _DONE_REASONS[finished.reason]
        line["total_duration"], line["load_duration"] = _nanoseconds(time.monotonic() - self._began), 0
        line["prompt_eval_count"] = finished.usage.prompt_tokens
        line["prompt_eval_duration"] = _nanoseconds(finished.timings.prefill_seconds)
        line["eval_count"] = finished.usage.completion_tokens
        line["eval_duration"] = _nanoseconds(finished.timings.decode_seconds)
        return line


class OllamaChatFormat(_OllamaFormat[OllamaChatResponse]):
    def _line(self, text: str, reasoning: str = "", calls: list[OllamaCall] | None = None) -> OllamaChatResponse:
        message: OllamaAnswer = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"model": self._model, "created_at": timestamp(time.time()), "message": message, "done": False}


class OllamaPromptFormat(_OllamaFormat[OllamaGenerateResponse]):
    """Formatter of a prompt's completion, which has no calls."""

    def _line(self, text: str, reasoning: str = "", calls: list[OllamaCall] | None = None) -> OllamaGenerateResponse:
        line: OllamaGenerateResponse = {
            "model": self._model,
            "created_at": timestamp(time.time()),
            "response": text,
            "done": False,
        }
        if reasoning:
            line["thinking"] = reasoning
        return line


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _scored(line: LineT, tokens: Iterable[ScoredToken]) -> LineT:
    if (scored := chat_logprobs(tokens)) is not None:
        line["logprobs"] = scored["content"]
    return line


def _calls(calls: list[CollectedCall]) -> list[OllamaCall]:
    """Return the calls with their arguments as objects. A call that a limit has cut short is left out."""
    bodies: list[OllamaCall] = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            called: OllamaCalled = {"index": len(bodies), "name": call.name, "arguments": arguments}
            bodies.append({"id": call.id, "function": called})
    return bodies


TAG = ":latest"  # Ollama's name for a model without a tag
# Ollama unloads models that are not used. One that stays expires in a year.
_EXPIRES_SECONDS = 365 * 24 * 3600.0
_MILLION = 1_000_000


def find_model(call: ApiCall, body: OllamaGenerationBody | OllamaEmbedBody | OllamaEmbeddingsBody) -> str:
    """Return the name that answers have, for a name with or without the tag `latest`, and obey `keep_alive`."""
    name = check_model(call.runtime, body.model.removesuffix(TAG))
    if body.keep_alive is None:
        return name
    models = call.runtime.models
    if models is None or not models.may_control:
        call.report_ignored(call.route.api, ("keep_alive",))
        return name
    seconds = body.keep_seconds
    models.keep_alive(known_model(models, name), None if seconds < 0 else seconds)
    return name


def _unloads(call: ApiCall, body: OllamaGenerationBody) -> bool:
    models = call.runtime.models
    return models is not None and models.may_control and body.keep_alive is not None and body.keep_seconds == 0


def _facts(runtime: ApiRuntime) -> dict[str, Any]:
    facts: dict[str, Any] = runtime.info().get("model", {})
    return facts


def _model(runtime: ApiRuntime, name: str, served_name: str) -> OllamaModel:
    return {
        "name": name,
        "model": name,
        "size": _facts(runtime).get("weight_bytes", 0),
        "digest": hashlib.sha256(served_name.encode()).hexdigest(),
        "details": _details(runtime),
    }


def _details(runtime: ApiRuntime) -> OllamaDetails:
    info = runtime.info()
    facts = info.get("model", {})
    family = str(facts.get("architecture", ""))
    precision = info.get("plan", {}).get("precision", {}).get("value", "")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{facts.get('num_parameters', 0) / _MILLION:.0f}M",
        "quantization_level": str(precision).upper(),
    }


def _model_info(served: ServedModel, facts: dict[str, Any]) -> dict[str, Any]:
    family = str(facts.get("architecture", ""))
    size = "embedding_length"
    return {
        "general.architecture": family,
        "general.parameter_count": facts.get("num_parameters", 0),
        f"{family}.context_length": served.limits.max_model_len,
        f"{family}.block_count": facts.get("num_layers", 0),
        f"{family}.{size}": facts.get("hidden_size", 0),
    }


def _capabilities(served: ServedModel) -> list[str]:
    if isinstance(served, ServedEncoder):
        return ["embedding"]
    if not isinstance(served, ServedDecoder):
        return []
    given = {
        "tools": served.chat is not None,
        "thinking": served.reasoning_format is not None,
        "vision": served.pictures is not None,
    }
    return ["completion", *(name for name, is_given in given.items() if is_given)]


# ---- routes ----------------------------------------------------------------------------------------------------------

OLLAMA = Dialect("Ollama", OLLAMA_ERRORS, needs_type=False)
_LINES = EventEncoding(OLLAMA_ERRORS, format_line, media_type=NDJSON)
_GENERATION: dict[str, Any] = {
    "operation": "text_completion",
    "encoding": _LINES,
    "find_model": find_model,
    "field_names": {
        **{name: f"options.{name}" for name in Options.model_fields},
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        "json_schema": "format",
    },
    "openapi": {"response_description": "Lines of JSON; with `stream` false, the whole response."},
}


# Without a generation the client only wants the model loaded, which it is.
@OLLAMA.generates("/api/chat", "Ollama: chat", prompts=MESSAGES, **_GENERATION | {"operation": "chat"})
async def chat(
    call: ApiCall, body: OllamaChatBody, name: str
) -> Generation[OllamaChatResponse, OllamaChatResponse] | Reply[OllamaChatResponse]:
    """Generate the answer to a chat."""
    form, request = OllamaChatFormat(name), chat_generation(call.runtime, body)
    return (
        Reply(form.loaded(_unloads(call, body)))
        if request is None
        else Generation([request], form, body.stream is not False)
    )


@OLLAMA.generates("/api/generate", "Ollama: generate", prompts=("prompt",), **_GENERATION)
async def generate(
    call: ApiCall, body: OllamaGenerateBody, name: str
) -> Generation[OllamaGenerateResponse, OllamaGenerateResponse] | Reply[OllamaGenerateResponse]:
    """Generate from a prompt."""
    form, request = OllamaPromptFormat(name), prompt_generation(call.runtime, body)
    return (
        Reply(form.loaded(_unloads(call, body)))
        if request is None
        else Generation([request], form, body.stream is not False)
    )


@OLLAMA.encodes("/api/embed", "Ollama: embeddings of texts", operation="embeddings", find_model=find_model)
async def embed(
    call: ApiCall, body: OllamaEmbedBody, served: ServedEncoder
) -> Encoding[OllamaEmbedResponse] | Reply[OllamaEmbedResponse]:
    """Embed texts; the vectors have length 1. Without a text there are none, as with Ollama."""
    if not body.input:
        return Reply(
            {
                "model": served.name,
                "embeddings": [],
                "total_duration": 0,
                "load_duration": 0,
                "prompt_eval_count": 0,
            }
        )

    async def write(encoded: Encoded) -> bytes:
        rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
        timings = encoded.timings
        tail = b'],"model":%b,"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (
            to_json(served.name),
            _nanoseconds(timings.queue_seconds + timings.encode_seconds),
            encoded.usage.prompt_tokens,
        )
        return await join_with_pauses(b'{"embeddings":[', rows, tail)

    request = EncodingRequest(
        inputs=(body.input,) if isinstance(body.input, str) else body.input,
        outputs=("embedding",),
        api=call.route.api,
        request_id=call.id,
        truncation=Truncation(body.truncate is not False),
        normalize=True,
        dimensions=body.dimensions,
    )
    return Encoding(request, write)


@OLLAMA.encodes(
    "/api/embeddings",
    "Ollama: embedding of a text, the older form",
    operation="embeddings",
    find_model=find_model,
)
async def embeddings(
    call: ApiCall, body: OllamaEmbeddingsBody, served: ServedEncoder
) -> Encoding[OllamaEmbeddingsResponse] | Reply[OllamaEmbeddingsResponse]:
    """Embed a text. An empty prompt has an empty vector, as with Ollama."""
    if not body.prompt:
        return Reply({"embedding": []})

    async def write(encoded: Encoded) -> bytes:
        return b'{"embedding":%b}' % to_json_list(to_numpy(encoded.arrays["embedding"])[0])

    request = EncodingRequest(
        inputs=(body.prompt,),
        outputs=("embedding",),
        api=call.route.api,
        request_id=call.id,
        truncation=Truncation(True),
        field="prompt",
    )
    return Encoding(request, write)


def _find_to_pull(call: ApiCall, body: NameBody) -> str:
    name = body.wanted.removesuffix(TAG)
    if (models := call.runtime.models) is not None:
        return known_model(models, name).name
    return check_model(call.runtime, name, in_path=True)


@OLLAMA.post(
    "/api/pull",
    "Ollama: success for a served model, which is here",
    event=OllamaStatus,
    encoding=_LINES,
    find_model=_find_to_pull,
    loads=False,
    openapi={"response_description": "Lines of JSON that end with the status success; with `stream` false, that one."},
)
async def pull(call: ApiCall, body: NameBody) -> Reply[OllamaStatus] | Response:
    """Fetch nothing, and find no other model than the served one."""
    if body.stream is False:
        return Reply({"status": "success"})
    lines = (format_line({"status": status}) for status in ("pulling manifest", "verifying sha256 digest", "success"))
    return Response(b"".join(lines), media_type=NDJSON)


@OLLAMA.get("/api/tags", "Ollama: the served models", statuses=(503,))
async def tags(call: ApiCall) -> OllamaModels:
    """List the names of the model."""
    modified = timestamp(call.runtime.created)
    if (models := call.runtime.models) is not None:
        named = [_model(entry.runtime, name, entry.name) for entry in models.entries for name in entry.names]
    else:
        named = [_model(call.runtime, name, call.service.model.name) for name in served_names(call.runtime)]
    return {"models": [{**each, "modified_at": modified} for each in named]}


@OLLAMA.get("/api/ps", "Ollama: the loaded models", statuses=(503,))
async def processes(call: ApiCall) -> OllamaModels:
    """Show the models that are loaded, and when each is unloaded."""
    if (models := call.runtime.models) is None:
        return {"models": [_loaded(call.runtime, None)]}
    return {"models": [_loaded(each.runtime, each.expires_at) for each in models.entries if each.state == "ready"]}


def _loaded(runtime: ApiRuntime, expires_at: float | None) -> OllamaModel:
    served = runtime.service.model
    model = _model(runtime, served.name, served.name)
    model["expires_at"] = timestamp(expires_at or time.time() + _EXPIRES_SECONDS)
    model["size_vram"], model["context_length"] = 0, served.limits.max_model_len
    return model


@OLLAMA.post(
    "/api/show",
    "Ollama: description of the model",
    find_model=lambda call, body: check_model(call.runtime, body.wanted.removesuffix(TAG)),
)
async def show(call: ApiCall, body: NameBody) -> OllamaShow:
    """Describe the model."""
    runtime = call.runtime
    served = runtime.service.model
    template = served.chat.source if isinstance(served, ServedDecoder) and served.chat else "{{ .Prompt }}"
    return {
        "license": "",
        "modelfile": f"FROM {served.name}\n",
        "parameters": "",
        "template": template,
        "details": _details(runtime),
        "model_info": _model_info(served, _facts(runtime)),
        "capabilities": _capabilities(served),
        "modified_at": timestamp(runtime.created),
    }


@OLLAMA.get("/api/version", "Ollama: version of the server")
async def version(call: ApiCall) -> OllamaVersion:
    """Return the server's version."""
    return {"version": VERSION}
