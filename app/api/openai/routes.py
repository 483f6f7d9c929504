"""OpenAI dialect: chat completions, completions, the list of models, and vLLM's routes that load LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import PlainTextResponse

from app.api.openai.output import ChatFormat, CompletionFormat, ShownTokens
from app.api.openai.schemas import (
    OPENAI_ERRORS,
    ChatBody,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionBody,
    GenerationBody,
    InputTokenCount,
    LoadAdapterBody,
    ModelCapabilities,
    ModelList,
    ModelObject,
    TextCompletion,
    UnloadAdapterBody,
)
from app.api.openai.translate import chat_request, completion_requests
from app.api.routing import (
    BODY_ERRORS,
    MESSAGES,
    ApiCall,
    ApiRuntime,
    Dialect,
    ModelState,
    ServedEntry,
    check_model,
    known_model,
    new_response_id,
    sampling_defaults,
    served_names,
)
from app.api.streaming import DONE, EventEncoding, Generation
from app.errors import NotReady
from app.service.served_model import ServedDecoder, ServedEncoder

OPENAI = Dialect("OpenAI", OPENAI_ERRORS)
EVENTS = EventEncoding(OPENAI_ERRORS, last=DONE)
_DESCRIPTION = {"response_description": "The completion; with `stream`, events that end with `[DONE]`."}


# Clients of servers that have OpenAI's routes without a prefix send the same bodies there. llama.cpp has /completions.
@OPENAI.generates(
    ("/v1/chat/completions", "/chat/completions"),
    "OpenAI: chat completion",
    operation="chat",
    prompts=MESSAGES,
    encoding=EVENTS,
    openapi=_DESCRIPTION,
)
async def chat_completions(call: ApiCall, body: ChatBody, name: str) -> Generation[ChatCompletion, ChatCompletionChunk]:
    """Generate the answer to a chat."""
    form = ChatFormat(
        _metadata(body, "chatcmpl-", name),
        body,
        _shown(body),
        shows_reasoning=body.include_reasoning is not False,
        calls_functions=body.functions is not None,
        echoed=body.echoed,
    )
    return Generation([chat_request(body, sampling_defaults(call.runtime))], form, body.stream)


@OPENAI.generates(
    "/v1/completions",
    "OpenAI: text completion",
    operation="text_completion",
    prompts=("prompt", "prompt[]"),
    encoding=EVENTS,
    openapi=_DESCRIPTION,
)
async def completions(call: ApiCall, body: CompletionBody, name: str) -> Generation[TextCompletion, TextCompletion]:
    """Complete each prompt, as a request of its own."""
    requests = completion_requests(body, sampling_defaults(call.runtime))
    form = CompletionFormat(
        _metadata(body, "cmpl-", name), body, _shown(body), requests[0].params.n, body.logprobs if body.echo else None
    )
    return Generation(requests, form, body.stream)


def _metadata(body: GenerationBody, prefix: str, name: str) -> tuple[str, int, str]:
    return new_response_id(prefix), int(time.time()), name


def _shown(body: GenerationBody) -> ShownTokens:
    return ShownTokens(
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
        body.prompt_logprobs,
        frozenset({"prompt_logprobs", "return_token_ids"} & body.model_fields_set),
    )


@OPENAI.post(
    ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
    "llama.cpp: number of tokens of a chat",
    task="generate",
)
async def count_input_tokens(call: ApiCall, body: ChatBody) -> InputTokenCount:
    """Count the tokens of a chat's prompt."""
    return {"input_tokens": await num_chat_tokens(call, body)}


async def num_chat_tokens(call: ApiCall, body: ChatBody) -> int:
    """Return the number of tokens of a chat's prompt, in the body that every dialect of chats is translated to."""
    chat = chat_request(body, {})
    ids = await call.service.tokenize_chat(
        chat.messages or (), chat.template_arguments, chat.chat_options, chat.pictures
    )
    return len(ids)


@OPENAI.get(("/v1/models", "/models"), "OpenAI: the served models, under each of their names", statuses=(503,))
async def models(call: ApiCall) -> ModelList:
    """List the names that requests may give as the model."""
    if call.runtime.models is not None:
        entries = [(entry, each) for entry in call.runtime.models.entries for each in entry.names]
        able = [_capabilities(entry.runtime, each) for entry, each in entries if entry.state == "ready"]
        return {"object": "list", "data": [_entry(entry, each) for entry, each in entries], "models": able}
    names = served_names(call.runtime)
    return {
        "object": "list",
        "data": [_model(call.runtime, name) for name in names],
        "models": [_capabilities(call.runtime, name) for name in names],
    }


def _capabilities(runtime: ApiRuntime, name: str) -> ModelCapabilities:
    served = runtime.service.model
    can = ["embedding"] if isinstance(served, ServedEncoder) else []
    if isinstance(served, ServedDecoder):
        can = ["completion", *(["multimodal"] if served.pictures is not None else [])]
    return {"name": name, "model": name, "capabilities": can}


@OPENAI.get(("/v1/models/{name:path}", "/models/{name:path}"), "OpenAI: one model")
async def model(call: ApiCall) -> ModelObject:
    """Describe the model of a name."""
    name = call.request.path_params["name"]
    if (models := call.runtime.models) is not None:
        return _entry(known_model(models, name), name)
    check_model(call.runtime, name, in_path=True)
    return _model(call.runtime, name)


_STATUS: Mapping[ModelState, str] = {"ready": "loaded", "unloading": "loaded", "loading": "loading"}


def _entry(entry: ServedEntry, name: str) -> ModelObject:
    """Describe one of several models, whether it is loaded or not."""
    status: dict[str, Any] = {"value": _STATUS.get(entry.state, "unloaded")}
    if entry.state == "failed":
        status["failed"] = True
    body: ModelObject = {
        "id": name,
        "object": "model",
        "created": entry.runtime.created,
        "owned_by": "armature",
        "root": entry.name,
        "max_model_len": entry.max_model_len,
        "status": status,
    }
    if name not in (entry.name, *entry.runtime.names.aliases):
        body["root"], body["parent"] = name, entry.name  # an adapter
    return body


def _model(runtime: ApiRuntime, name: str) -> ModelObject:
    served, adapter = runtime.service.model, runtime.service.adapters.find(name)
    body: ModelObject = {
        "id": name,
        "object": "model",
        "created": runtime.created,
        "owned_by": "armature",
        "root": served.name if adapter is None else adapter.name,
        "max_model_len": served.limits.max_model_len,
    }
    if adapter is not None:
        body["parent"] = served.name
    return body


_PLAIN_TEXT = {"response_class": PlainTextResponse}


@OPENAI.post(
    "/v1/load_lora_adapter",
    "vLLM: load a LoRA adapter, which requests then choose as the model",
    statuses=(*BODY_ERRORS, 404),
    task="generate",
    openapi=_PLAIN_TEXT,
)
async def load_adapter(call: ApiCall, body: LoadAdapterBody) -> PlainTextResponse:
    """Load an adapter, if the operator gave a directory for them."""
    service = call.service
    if not service.ready:
        raise NotReady(f"The model is not ready: {service.stage}.")
    await service.adapters.load(body.lora_name, body.lora_path, (service.model.name, *call.runtime.names.aliases))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@OPENAI.post(
    "/v1/unload_lora_adapter",
    "vLLM: unload a LoRA adapter once its open requests have ended",
    statuses=(*BODY_ERRORS, 404),
    task="generate",
    openapi=_PLAIN_TEXT,
)
async def unload_adapter(call: ApiCall, body: UnloadAdapterBody) -> PlainTextResponse:
    """Unload an adapter."""
    call.service.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
