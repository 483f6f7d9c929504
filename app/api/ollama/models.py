"""Ollama's routes about models: the served one is the only one, and it is always loaded."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.ollama.output import timestamp
from app.api.ollama.schemas import OLLAMA_ERRORS, NameBody, OllamaModels, OllamaShow, OllamaStatus, OllamaVersion
from app.api.routing import (
    BODY_ERRORS,
    NDJSON,
    ApiRuntime,
    DialectRouter,
    RequestBody,
    check_model,
    runtime_of,
    served_names,
)
from app.api.streaming import format_line
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel
from app.version import VERSION

Json = dict[str, Any]
TAG = ":latest"  # Ollama's name for a model without a tag
# Ollama unloads models that are not used. Ours stays, so it expires in a year.
_EXPIRES_SECONDS = 365 * 24 * 3600.0
_MILLION = 1_000_000
router = DialectRouter("Ollama", OLLAMA_ERRORS)


def check_name(runtime: ApiRuntime, name: str) -> str:
    """Return the name that answers have (`check_model`), for a name with or without the tag `latest`."""
    return check_model(runtime, name.removesuffix(TAG))


@router.post(
    "/api/pull",
    summary="Ollama: success for the served model, which is here",
    response_model=OllamaStatus,
    responses=router.failures(*BODY_ERRORS, 404) | router.line_stream(OllamaStatus),
    response_description="Lines of JSON that end with the status success; with `stream` false, that one.",
)
async def pull(request: Request, unread: RequestBody[NameBody]) -> Response:
    """Serve `POST /api/pull`. Nothing is fetched, and another model is not found."""
    runtime = runtime_of(request)
    body = await unread.parse(needs_type=False)
    check_model(runtime, body.wanted.removesuffix(TAG), in_path=True)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = (format_line({"status": status}) for status in ("pulling manifest", "verifying sha256 digest", "success"))
    return Response(b"".join(lines), media_type=NDJSON)


@router.get(
    "/api/tags", summary="Ollama: the served model", response_model=OllamaModels, responses=router.failures(503)
)
async def tags(request: Request) -> Response:
    """Serve `GET /api/tags`."""
    runtime = runtime_of(request)
    names = served_names(runtime)
    modified = {"modified_at": timestamp(runtime.created)}
    return JSONResponse({"models": [_model(runtime, name) | modified for name in names]})


@router.get("/api/ps", summary="Ollama: the loaded model", response_model=OllamaModels, responses=router.failures(503))
async def processes(request: Request) -> Response:
    """Serve `GET /api/ps`."""
    runtime = runtime_of(request)
    served = runtime.service.model
    loaded = {
        "expires_at": timestamp(time.time() + _EXPIRES_SECONDS),
        "size_vram": 0,
        "context_length": served.limits.max_model_len,
    }
    return JSONResponse({"models": [_model(runtime, served.name) | loaded]})


@router.post(
    "/api/show",
    summary="Ollama: description of the model",
    response_model=OllamaShow,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def show(request: Request, unread: RequestBody[NameBody]) -> Response:
    """Serve `POST /api/show`."""
    runtime = runtime_of(request)
    body = await unread.parse(needs_type=False)
    check_name(runtime, body.wanted)
    served, facts = runtime.service.model, _facts(runtime)
    template = served.chat.source if isinstance(served, ServedDecoder) and served.chat else "{{ .Prompt }}"
    description: Json = {
        "license": "",
        "modelfile": f"FROM {served.name}\n",
        "parameters": "",
        "template": template,
        "details": _details(runtime),
        "model_info": _model_info(served, facts),
        "capabilities": _capabilities(served),
        "modified_at": timestamp(runtime.created),
    }
    return JSONResponse(description)


@router.get("/api/version", summary="Ollama: version of the server", response_model=OllamaVersion)
async def version(request: Request) -> Response:
    """Serve `GET /api/version`."""
    return JSONResponse({"version": VERSION})


def _facts(runtime: ApiRuntime) -> Json:
    facts: Json = runtime.info().get("model", {})
    return facts


def _model(runtime: ApiRuntime, name: str) -> Json:
    return {
        "name": name,
        "model": name,
        "size": _facts(runtime).get("weight_bytes", 0),
        "digest": hashlib.sha256(runtime.service.model.name.encode()).hexdigest(),
        "details": _details(runtime),
    }


def _details(runtime: ApiRuntime) -> Json:
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


def _model_info(served: ServedModel, facts: Json) -> Json:
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
    tools = ["tools"] if served.chat is not None else []
    return ["completion", *tools, *(["thinking"] if served.reasoning_format is not None else [])]
