"""vLLM's routes that load and unload LoRA adapters while the server runs, if the operator gave a directory for them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, runtime_of
from app.api.schemas import Body
from app.errors import NotReady

router = DialectRouter("OpenAI", OPENAI_ERRORS)


class LoadAdapterBody(Body):
    """Body of `POST /v1/load_lora_adapter`. `lora_path` is a directory below the server's lora_root."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


@router.post(
    "/v1/load_lora_adapter",
    summary="vLLM: load a LoRA adapter, which requests then choose as the model",
    response_class=PlainTextResponse,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def load_adapter(request: Request, unread: RequestBody[LoadAdapterBody]) -> Response:
    """Serve `POST /v1/load_lora_adapter`."""
    runtime = runtime_of(request)
    body = await unread.parse()
    if not runtime.service.ready:
        raise NotReady(f"The model is not ready: {runtime.service.stage}.")
    reserved = (runtime.service.model.name, *runtime.names.aliases)
    await runtime.service.adapters.load(body.lora_name, body.lora_path, reserved)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    summary="vLLM: unload a LoRA adapter once its open requests have ended",
    response_class=PlainTextResponse,
    responses=router.failures(*BODY_ERRORS, 404),
)
async def unload_adapter(request: Request, unread: RequestBody[UnloadAdapterBody]) -> Response:
    """Serve `POST /v1/unload_lora_adapter`."""
    body = await unread.parse()
    runtime_of(request).service.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
