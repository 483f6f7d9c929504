"""Routes about the server that clients of llama.cpp, vLLM and others read: health, properties, slots, chat template."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from app.api.llama_cpp.completion import sampling_settings
from app.api.llama_cpp.schemas import LLAMA_CPP_ERRORS
from app.api.openai.schemas import ChatBody
from app.api.openai.translate import chat_request
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    check_model,
    request_id,
    runtime_of,
    sampling_defaults,
)
from app.errors import NotReady
from app.messages import SamplingParams
from app.service.served_model import ServedDecoder
from app.version import VERSION


class HealthStatus(TypedDict):
    """Response of `/health` and `/ping` when the server is ready."""

    status: str


class ServerVersion(TypedDict):
    """Response of `/version`."""

    version: str


class DefaultSettings(TypedDict):
    """Sampling parameters of a request that gives none, and the context of one request."""

    params: dict[str, Any]
    n_ctx: int


class ServerProperties(TypedDict):
    """Response of `/props`."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
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


probes = DialectRouter("llama.cpp", LLAMA_CPP_ERRORS, public=True)
router = DialectRouter("llama.cpp", LLAMA_CPP_ERRORS)


@probes.get(
    "/health",
    summary="Readiness, as /readyz, in llama.cpp's format",
    response_model=HealthStatus,
    responses=probes.failures(503),
)
@probes.get("/ping", summary="Readiness, as /health", response_model=HealthStatus, responses=probes.failures(503))
async def health(request: Request) -> Response:
    """Report readiness; 503 while the model is loading."""
    service = runtime_of(request).service
    if service.ready:
        return JSONResponse({"status": "ok"})
    raise NotReady(f"The model is not ready: {service.stage}.")


@router.get("/version", summary="Version of the server", response_model=ServerVersion)
async def version(request: Request) -> Response:
    """Return the server's version."""
    return JSONResponse({"version": VERSION})


@router.get(
    "/props",
    summary="llama.cpp: properties of the server",
    response_model=ServerProperties,
    responses=router.failures(503),
)
async def properties(request: Request) -> Response:
    """Serve `GET /props`."""
    runtime = runtime_of(request)
    served = runtime.service.model
    is_decoder = isinstance(served, ServedDecoder)
    names = served.tokenizer.named_tokens if isinstance(served, ServedDecoder) else {}
    template = served.chat.source if isinstance(served, ServedDecoder) and served.chat is not None else ""
    params = SamplingParams(**sampling_defaults(runtime)) if is_decoder else SamplingParams()  # type: ignore[arg-type]
    return JSONResponse(
        {
            "default_generation_settings": {
                "params": sampling_settings(params),
                "n_ctx": served.limits.max_model_len,
            },
            "total_slots": served.limits.max_running_seqs,
            "model_path": served.name,
            "model_alias": served.name,
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
            "bos_token": names.get("bos_token", ""),
            "eos_token": names.get("eos_token", ""),
            "build_info": f"armature-{VERSION}",
        }
    )


FAIL_ON_NO_SLOT = {
    "name": "fail_on_no_slot",
    "in": "query",
    "description": "1: answer 503 if no slot is free.",
    "schema": {"type": "string"},
}


@router.get(
    "/slots",
    summary="llama.cpp: places for running requests",
    response_model=list[Slot],
    responses=router.failures(503),
    openapi_extra={"parameters": [FAIL_ON_NO_SLOT]},
)
async def slots(request: Request) -> Response:
    """Serve `GET /slots`: as many busy slots as requests run. Which request has which slot is not kept."""
    service = runtime_of(request).service
    limits, num_running = service.model.limits, service.snapshot.num_running
    if request.query_params.get("fail_on_no_slot") and num_running >= limits.max_running_seqs:
        raise NotReady("No slot is free.")
    return JSONResponse(
        [
            {
                "id": place,
                "id_task": -1,
                "n_ctx": limits.max_model_len,
                "speculative": False,
                "is_processing": place < num_running,
            }
            for place in range(limits.max_running_seqs)
        ]
    )


@router.post(
    "/apply-template",
    summary="llama.cpp: the prompt that the chat template makes of messages",
    response_model=RenderedPrompt,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def apply_template(request: Request, unread: RequestBody[ChatBody]) -> Response:
    """Serve `POST /apply-template`."""
    runtime = runtime_of(request)
    body = await unread.parse(needs_type=False)
    check_model(runtime, body.model)
    chat = chat_request(body, request_id(request), {})
    text = await runtime.service.render_chat(chat.messages or (), chat.template_arguments, chat.chat_options)
    return JSONResponse({"prompt": text})
