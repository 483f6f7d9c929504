"""Endpoints of encoders: `/v1/embeddings` (OpenAI), `/embed` (native), rerank (Cohere's and Jina's format), classify.

Other dialects share the scoring, and the fast conversion of FP32 vectors to JSON with the nine digits that identify an
FP32 number: 384 numbers take 50 µs, with the `json` module 380 µs. Long responses are written in parts, between which
the event loop runs other tasks.
"""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray
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
    RerankBody,
    RerankResponse,
    TextsBody,
)
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, check_model, count_refusals, request_id, runtime_of
from app.api.streaming import server_timing
from app.errors import WrongModelKind
from app.messages import Text
from app.metrics.instruments import Api
from app.service.requests import Encoded, EncodingRequest, TextInput
from app.service.served_model import FloatArray, ServedEncoder, cosine_similarities, to_numpy
from app.service.service import Service

CHUNK_BYTES = 64 * 1024  # written in about half a millisecond


def to_json_list(vector: FloatArray) -> bytes:
    """Return a JSON list, nested for a matrix. Parsing it and rounding to FP32 gives the same numbers."""
    return to_json(_nine_digits(vector).tolist())


def to_base64_json(vector: FloatArray) -> bytes:
    """Return a JSON string with the base64 of the vector's bytes, little-endian FP32."""
    return b'"' + b64encode(vector.astype("<f4", copy=False).tobytes()) + b'"'


async def join_with_pauses(head: bytes, items: Iterable[bytes], tail: bytes) -> bytes:
    """Return `head`, the items separated by commas, and `tail`.

    The event loop runs other tasks after each `CHUNK_BYTES`.
    """
    parts, num_bytes = [head], 0
    for number, item in enumerate(items):
        if number:
            parts.append(b",")
        parts.append(item)
        num_bytes += len(item)
        if num_bytes > CHUNK_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    parts.append(tail)
    return b"".join(parts)


_MIN_EXPONENT, _MAX_EXPONENT = -46, 39  # powers of ten just outside the range of FP32
_SCALES = 10.0 ** (8.0 - numpy.arange(_MIN_EXPONENT, _MAX_EXPONENT))


def _nine_digits(vector: FloatArray) -> NDArray[numpy.float64]:
    """Return the nearest numbers with nine decimal digits.

    As text they are half as long as FP32 values written as doubles.
    """
    exact = vector.astype(numpy.float64)
    powers = numpy.floor(numpy.log10(numpy.abs(exact).clip(1e-45)))
    scales = _SCALES[powers.astype(numpy.int64) - _MIN_EXPONENT]
    rounded: NDArray[numpy.float64] = numpy.rint(exact * scales) / scales
    return rounded


VECTOR_WRITERS: Mapping[str, Callable[[FloatArray], bytes]] = {"float": to_json_list, "base64": to_base64_json}


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
        encoding = EncodingRequest(
            inputs=text_inputs(body.input),
            outputs=("embedding",),
            api="embeddings",
            request_id=request_id(request),
            truncate=bool(body.truncate or body.truncate_prompt_tokens),
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
    "/embed",
    summary="Embeddings of texts or token ids",
    response_model=EmbedResponse,
    responses=native_router.failures(*BODY_ERRORS, 504),
)
async def embed(request: Request, unread: RequestBody[EmbedBody]) -> Response:
    """Serve `POST /embed`."""
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
        truncate=bool(body.truncate),
        truncate_left=body.truncate_left,
        prompt=body.prompt_name,
        field="inputs",
    )


def text_inputs(given: tuple[str | tuple[int, ...], ...]) -> tuple[TextInput, ...]:
    """Convert the body's inputs: texts are kept, lists of token ids become a `Text`."""
    return tuple(one if isinstance(one, str) else Text(one) for one in given)


def json_response(body: bytes, encoded: Encoded, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response with the request's timings in the `Server-Timing` header."""
    timing_header = server_timing([encoded.timings], "queue", "encode")
    return Response(body, media_type="application/json", headers={**timing_header, **(headers or {})})


@dataclass(frozen=True, slots=True)
class Truncation:
    """Handling of a text that is too long."""

    truncate: bool = False
    truncate_left: bool = False


@dataclass(frozen=True, slots=True)
class RerankQuery:
    """Documents to be ranked against a query. `field` is the dialect's name for the documents."""

    query: str
    documents: tuple[str, ...]
    raw_scores: bool
    truncation: Truncation
    field: str


@dataclass(frozen=True, slots=True)
class ClassifyQuery:
    """Texts or pairs to be classified. `field` is the dialect's name for them."""

    texts: tuple[str | tuple[str, str], ...]
    raw_scores: bool
    truncation: Truncation
    field: str


LabelScores = list[tuple[str, float]]  # labels with their scores, best first


@openai_router.post(
    "/v1/rerank",
    summary="Rank documents by relevance to a query",
    response_model=RerankResponse,
    responses=ENCODING_ERRORS,
)
async def rerank(request: Request, unread: RequestBody[RerankBody]) -> Response:
    """Serve `POST /v1/rerank`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "rerank"):
        served = runtime.service.encoder
        body = await unread.parse()
        check_model(runtime, body.model)
        texts = body.texts
        encoding = rerank_encoding_request(
            served,
            RerankQuery(body.query, texts, bool(body.raw_scores), Truncation(bool(body.truncate)), "documents"),
            request_id(request),
        )
    encoded = await runtime.service.encode(encoding)
    ranked = sort_by_score(relevance_scores(served, encoded, bool(body.raw_scores)))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
    if body.return_documents:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    number = encoded.usage.prompt_tokens
    usage = {"prompt_tokens": number, "total_tokens": number}
    response_body = {"id": f"rerank-{uuid.uuid4().hex}", "model": served.name, "results": results, "usage": usage}
    return json_response(to_json(response_body), encoded)


@openai_router.post(
    "/v1/classify",
    summary="Classify texts: labels with scores",
    response_model=ClassifyResponse,
    responses=ENCODING_ERRORS,
)
async def classify(request: Request, unread: RequestBody[ClassifyBody]) -> Response:
    """Serve `POST /v1/classify`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "classify"):
        served = runtime.service.encoder
        body = await unread.parse()
        check_model(runtime, body.model)
        query = ClassifyQuery(body.texts, bool(body.raw_scores), Truncation(bool(body.truncate)), "input")
    encoded, scored = await classify_texts(runtime.service, query, request_id(request))
    data = [
        {
            "object": "classification",
            "index": index,
            "prediction": scores[0][0],
            "score": scores[0][1],
            "predictions": [{"label": label, "score": score} for label, score in scores],
        }
        for index, scores in enumerate(scored)
    ]
    number = encoded.usage.prompt_tokens
    usage = {"prompt_tokens": number, "total_tokens": number}
    return json_response(to_json({"object": "list", "data": data, "model": served.name, "usage": usage}), encoded)


# ---- shared with other dialects ------------------------------------------------------------------------------------


def rerank_encoding_request(served: ServedEncoder, query: RerankQuery, identity: str) -> EncodingRequest:
    """Return the encoding request for a ranking.

    For a cross-encoder, query and document are one text. For an embedding model, the query and each document are
    separate texts.

    Raises:
        WrongModelKind: the model has several labels.
    """
    if len(served.labels) > 1:
        raise WrongModelKind(
            f"{served.name!r} has {len(served.labels)} labels, and relevance is one score: use /v1/classify, "
            "or serve a cross-encoder or an embedding model.",
            field="model",
        )
    pairs = tuple((query.query, document) for document in query.documents)
    inputs: tuple[TextInput, ...] = pairs if served.labels else (query.query, *query.documents)
    return EncodingRequest(
        inputs=inputs,
        outputs=("logits",) if served.labels else ("embedding",),
        api="rerank",
        request_id=identity,
        truncate=query.truncation.truncate,
        truncate_left=query.truncation.truncate_left,
        num_queries=0 if served.labels else 1,
        field=query.field,
    )


def relevance_scores(served: ServedEncoder, encoded: Encoded, raw_scores: bool) -> list[float]:
    """Return one relevance per document.

    It is a cross-encoder's score, or its logit with `raw_scores`, or the cosine similarity for an embedding
    model.
    """
    if not served.labels:
        vectors = to_numpy(encoded.arrays["embedding"])
        return [float(score) for score in cosine_similarities(vectors[:1], vectors[1:])[0]]
    logits = encoded.arrays["logits"]
    return [float(score) for score in to_numpy(logits if raw_scores else served.scores(logits))[:, 0]]


def sort_by_score(scores: list[float]) -> list[tuple[int, float]]:
    """Return (index, score) pairs, best first; equal scores keep their order."""
    return sorted(enumerate(scores), key=lambda ranked: -ranked[1])


async def classify_texts(
    service: Service, query: ClassifyQuery, identity: str, api: Api = "classify"
) -> tuple[Encoded, list[LabelScores]]:
    """Classify the texts and return all labels of each text with scores, best first."""
    served = service.encoder
    encoding = EncodingRequest(
        inputs=query.texts,
        outputs=("logits",),
        api=api,
        request_id=identity,
        truncate=query.truncation.truncate,
        truncate_left=query.truncation.truncate_left,
        field=query.field,
    )
    encoded = await service.encode(encoding)
    logits = encoded.arrays["logits"]
    rows = to_numpy(logits if query.raw_scores else served.scores(logits)).tolist()
    return encoded, [[(served.labels[place], score) for place, score in sort_by_score(row)] for row in rows]
