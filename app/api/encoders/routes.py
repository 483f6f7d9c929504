"""Endpoints of encoders in OpenAI's format and in the native one: `/v1/embeddings`, `/v1/classify` and `/encode`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.encoders.schemas import (
    ClassifyBody,
    ClassifyResponse,
    EmbedBody,
    EmbeddingsBody,
    EmbeddingsResponse,
    EmbedResponse,
    TextsBody,
)
from app.api.encoders.scoring import ClassifyQuery, classify_texts, labels_by_score, text_inputs
from app.api.encoders.vectors import VECTOR_WRITERS, join_with_pauses, json_response, to_json_list
from app.api.llama_cpp.schemas import joined_ids
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    check_model,
    count_refusals,
    new_response_id,
    request_id,
    runtime_of,
)
from app.service.requests import Encoded, EncodingRequest
from app.service.served_model import ServedEncoder, to_numpy

openai_router = DialectRouter("OpenAI", OPENAI_ERRORS)
native_router = DialectRouter("Native")
ENCODING_ERRORS = openai_router.failures(*BODY_ERRORS, 404, 504)


@openai_router.post(
    "/v1/embeddings",
    summary="OpenAI: embeddings of texts",
    response_model=EmbeddingsResponse,
    responses=ENCODING_ERRORS,
)
async def embeddings(request: Request, unread: RequestBody[EmbeddingsBody]) -> Response:
    """Serve `POST /v1/embeddings`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "embeddings"):
        served = runtime.service.encoder
        body = await unread.parse()
        check_model(runtime, body.model)
        inputs = [one if isinstance(one, str) else await joined_ids(runtime.service, one) for one in body.input]
        encoding = EncodingRequest(
            inputs=text_inputs(inputs),
            outputs=("embedding",),
            api="embeddings",
            request_id=request_id(request),
            truncation=body.truncation,
            normalize=body.use_activation,
            dimensions=body.dimensions,
        )
    encoded = await runtime.service.encode(encoding)
    write = VECTOR_WRITERS[body.encoding_format or "float"]
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(vector))
        for index, vector in enumerate(to_numpy(encoded.arrays["embedding"]))
    )
    number = encoded.usage.prompt_tokens
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (to_json(served.name), number, number)
    return json_response(await join_with_pauses(b'{"object":"list","data":[', rows, tail), encoded)


@native_router.post(
    "/encode",
    summary="Embeddings of texts or token ids",
    response_model=EmbedResponse,
    responses=native_router.failures(*BODY_ERRORS, 504),
)
async def encode(request: Request, unread: RequestBody[EmbedBody]) -> Response:
    """Serve `POST /encode`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await unread.parse()
        encoding = replace(
            native_encoding_request(body, "embedding", request), normalize=body.normalize, dimensions=body.dimensions
        )
    encoded = await runtime.service.encode(encoding)
    rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
    tail = b'],"usage":{"prompt_tokens":%d}}' % encoded.usage.prompt_tokens
    return json_response(await join_with_pauses(b'{"embeddings":[', rows, tail), encoded)


def native_encoding_request(body: TextsBody, output: str, request: Request) -> EncodingRequest:
    """Return the encoding request of a native body for one output."""
    return EncodingRequest(
        inputs=text_inputs(body.inputs),
        outputs=(output,),
        api="native",
        request_id=request_id(request),
        truncation=body.truncation,
        prompt=body.prompt_name,
        field="inputs",
    )


@openai_router.post(
    "/v1/classify",
    summary="Classify texts: labels with scores; also vLLM's",
    response_model=ClassifyResponse,
    responses=ENCODING_ERRORS,
)
async def classify(request: Request, unread: RequestBody[ClassifyBody]) -> Response:
    """Serve `POST /v1/classify` and `/classify`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "classify"):
        served = runtime.service.encoder
        body = await unread.parse()
        check_model(runtime, body.model)
        query = ClassifyQuery(
            body.texts, bool(body.raw_scores) or body.use_activation is False, body.truncation, "input"
        )
    encoded, rows = await classify_texts(runtime.service, query, request_id(request))
    data = [_classification(served, index, row) for index, row in enumerate(rows)]
    return json_response(to_json(list_fields("classify", served, encoded) | {"data": data}), encoded)


def _classification(served: ServedEncoder, index: int, scores: list[float]) -> dict[str, Any]:
    ranked = labels_by_score(served, scores)
    return {
        "object": "classification",
        "index": index,
        "label": ranked[0][0],
        "probs": scores,
        "num_classes": len(scores),
        "prediction": ranked[0][0],
        "score": ranked[0][1],
        "predictions": [{"label": label, "score": score} for label, score in ranked],
    }


def list_fields(kind: str, served: ServedEncoder, encoded: Encoded) -> dict[str, Any]:
    """Return the fields common to vLLM's responses. Their `id` begins with `kind`."""
    number = encoded.usage.prompt_tokens
    return {
        "id": new_response_id(f"{kind}-"),
        "object": "list",
        "created": int(time.time()),
        "model": served.name,
        "usage": {"prompt_tokens": number, "total_tokens": number},
    }
