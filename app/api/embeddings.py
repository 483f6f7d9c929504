"""Embedding endpoints: `/v1/embeddings` (OpenAI) and `/embed` (native)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.dependencies import check_model, counting_refusals, read_body, request_id, runtime_of
from app.api.encoder_schemas import EmbedBody, EmbeddingsBody, TextsBody
from app.api.fold import server_timing
from app.api.vectors import base64, joined, json_list
from app.encoding import Encoded, EncodingRequest, TextInput
from app.messages import Text
from app.scores import Floats, floats

WRITERS: Mapping[str, Callable[[Floats], bytes]] = {"float": json_list, "base64": base64}


async def embeddings(request: Request) -> Response:
    """Serve `POST /v1/embeddings`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "embeddings"):
        served = runtime.service.encoder
        body = await read_body(request, EmbeddingsBody)
        check_model(runtime.service, body.model)
        wanted = EncodingRequest(
            inputs=inputs(body.input),
            outputs=("embedding",),
            api="embeddings",
            request_id=request_id(request),
            truncate=bool(body.truncate),
            dimensions=body.dimensions,
        )
    encoded = await runtime.service.encode(wanted)
    written = WRITERS[body.encoding_format or "float"]
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, written(vector))
        for index, vector in enumerate(floats(encoded.arrays["embedding"]))
    )
    number = encoded.usage.prompt_tokens
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (to_json(served.name), number, number)
    return answered(await joined(b'{"object":"list","data":[', rows, tail), encoded)


async def embed(request: Request) -> Response:
    """Serve `POST /embed`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await read_body(request, EmbedBody)
        wanted = replace(wanted_of(body, "embedding", request), normalize=body.normalize, dimensions=body.dimensions)
    encoded = await runtime.service.encode(wanted)
    rows = (json_list(vector) for vector in floats(encoded.arrays["embedding"]))
    tail = b'],"usage":{"prompt_tokens":%d}}' % encoded.usage.prompt_tokens
    return answered(await joined(b'{"embeddings":[', rows, tail), encoded)


def wanted_of(body: TextsBody, output: str, request: Request) -> EncodingRequest:
    """Return the encoding request of a native body for one output."""
    return EncodingRequest(
        inputs=inputs(body.inputs),
        outputs=(output,),
        api="native",
        request_id=request_id(request),
        truncate=bool(body.truncate),
        keeps_end=body.keeps_end,
        prompt=body.prompt_name,
        field="inputs",
    )


def inputs(given: tuple[str | tuple[int, ...], ...]) -> tuple[TextInput, ...]:
    """Convert the body's inputs: texts are kept, lists of token ids become a `Text`."""
    return tuple(one if isinstance(one, str) else Text(one) for one in given)


def answered(body: bytes, encoded: Encoded, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response with the request's timings in the `Server-Timing` header."""
    told = server_timing([encoded.timings], "queue", "encode")
    return Response(body, media_type="application/json", headers={**told, **(headers or {})})
