"""text-embeddings-inference dialect: embed, embed_all, predict, similarity and decode, with their request bodies.

Its rerank is in `encoders/rerank.py`, its tokenize in `tokenizer.py`, and its part of `/info` in `health.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from app.api.encoders.routes import native_encoding_request
from app.api.encoders.schemas import NON_EMPTY, EmbedBody, LabelScore, NonEmptyText, TextsBody, TruncationFields
from app.api.encoders.scoring import ClassifyQuery, classify_texts, labels_by_score
from app.api.encoders.vectors import join_with_pauses, json_response, to_json_list, token_header
from app.api.errors import ErrorFormat, HttpError
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    UnreadBody,
    answer_errors_as,
    count_refusals,
    renamed_fields,
    request_id,
    runtime_of,
)
from app.api.schemas import LEAVE_OUT, Body, Int64, Refusal, refused, validate_token_ids
from app.errors import WrongModelKind
from app.metrics.instruments import Api
from app.service.encode import MAX_TEXTS
from app.service.requests import Encoded, EncodingRequest
from app.service.served_model import ServedEncoder, ServedModel, paired_similarities, to_numpy

TextOrPair = str | tuple[str, str]


def _validate_predict_input(value: Any) -> tuple[bool, tuple[TextOrPair, ...]]:
    """Return whether the input is a batch, and the texts.

    A list of strings is one text or a pair; only a list of lists is a batch.
    """
    if isinstance(value, list) and value and isinstance(value[0], list):
        return True, tuple(_validate_text_or_pair(item) for item in value)
    return False, (value if isinstance(value, str) else _validate_text_or_pair(value),)


def _validate_text_or_pair(value: Any) -> TextOrPair:
    if isinstance(value, list) and len(value) in (1, 2) and set(map(type, value)) == {str}:
        return value[0] if len(value) == 1 else (value[0], value[1])
    raise ValueError("Input should be a string, a pair of strings, or a list of lists of one or two strings")


PredictInput = Annotated[
    Any,
    AfterValidator(_validate_predict_input),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                },
            ]
        }
    ),
]


class PredictParameters(Body):
    """Parameters with which the Hugging Face hub's client classifies texts."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(LEAVE_OUT, function_to_apply=())

    top_k: Annotated[Int64, Field(ge=1)] | None = None


class PredictBody(TruncationFields):
    """Body of `POST /predict`."""

    API: ClassVar[Api] = "classify"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "input": "send inputs here, or send input to /v1/classify.",
        "text": "send inputs here.",
    }

    inputs: PredictInput
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None


class EmbedAllBody(TextsBody):
    """Body of `POST /embed_all`."""


class Sentences(Body):
    """A sentence and the sentences that it is compared with."""

    source_sentence: NonEmptyText
    sentences: Annotated[tuple[str, ...], NON_EMPTY]


class SimilarityParameters(TruncationFields):
    """Parameters of `/similarity`."""

    prompt_name: str | None = Field(default=None)


class SimilarityBody(Body):
    """Body of `POST /similarity`."""

    API: ClassVar[Api] = "rerank"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "source_sentence": "send inputs with source_sentence and sentences.",
        "sentences": "send inputs with source_sentence and sentences.",
        "text_1": "send inputs with source_sentence and sentences, or send text_1 and text_2 to /score.",
    }

    inputs: Sentences
    parameters: SimilarityParameters | None = None


class TeiEmbedBody(EmbedBody):
    """Body of `POST /embed`. Vectors have length 1 unless `normalize` is false."""

    encoding_format: Literal["float"] | None = None


class SparseBody(TextsBody):
    """Body of `POST /embed_sparse`, which is refused."""


def _validate_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    """Convert a list of token ids, or a list of such lists, to a tuple of tuples."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return (validate_token_ids(value),)
    if len(value) > MAX_TEXTS:
        raise ValueError(f"Input should have at most {MAX_TEXTS} lists of token ids, not {len(value)}")
    return tuple(map(validate_token_ids, value))


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


class DecodeBody(Body):
    """Body of `POST /decode`."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "tokens": "send ids here, or send tokens to /detokenize.",
        "token_ids": "send ids here, or send token_ids to /detokenize.",
        "text": "send ids here; /tokenize takes texts.",
    }

    ids: Annotated[
        Any, AfterValidator(_validate_ids), WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS}]})
    ]
    skip_special_tokens: bool | None = None


class TeiError(TypedDict):
    """Error body of text-embeddings-inference."""

    error: str
    error_type: str


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "Backend" if error.status >= 500 else "Validation")
    return {"error": error.message, "error_type": kind}


_ERROR_TYPES: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}
TEI_ERRORS = ErrorFormat(_error_body, TeiError)
CHUNK_TOKENS = 16
router = DialectRouter("text-embeddings-inference", TEI_ERRORS)
root_router = DialectRouter("text-embeddings-inference")  # errors of its path have the native format otherwise
ENCODING_ERRORS = router.failures(*BODY_ERRORS, 504)


@router.post(
    "/embed",
    summary="text-embeddings-inference: embeddings of texts or token ids",
    response_model=list[list[float]],
    responses=ENCODING_ERRORS,
)
async def embed(request: Request, unread: RequestBody[TeiEmbedBody]) -> Response:
    """Serve `POST /embed`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await unread.parse()
        encoding = replace(
            native_encoding_request(body, "embedding", request),
            normalize=body.normalize is not False,
            dimensions=body.dimensions,
        )
    encoded = await runtime.service.encode(encoding)
    rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
    return json_response(await join_with_pauses(b"[", rows, b"]"), encoded, token_header(encoded))


@root_router.post(
    "/",
    summary="text-embeddings-inference: as /embed, or as /predict for a model with labels",
    response_model=list[list[float]] | list[LabelScore] | list[list[LabelScore]],
    responses=root_router.failures(*BODY_ERRORS, 504, also=TEI_ERRORS),
)
async def embed_or_predict(request: Request, unread: RequestBody[TeiEmbedBody]) -> Response:
    """Serve `POST /`."""
    answer_errors_as(request, TEI_ERRORS)
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        served = runtime.service.encoder
    if served.labels:
        return await predict(request, UnreadBody(request, PredictBody))
    return await embed(request, unread)


@router.post(
    "/embed_sparse",
    summary="text-embeddings-inference: refused, since no model here has sparse vectors",
    status_code=400,
    response_model=TeiError,
    responses=ENCODING_ERRORS,
)
async def embed_sparse(request: Request, unread: RequestBody[SparseBody]) -> Response:
    """Refuse `POST /embed_sparse`, and name what the served model gives instead."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        served = runtime.service.encoder
        instead = "scores at /predict" if served.labels else "dense vectors at /embed"
        raise WrongModelKind(f"{served.name!r} has no sparse vectors; it has {instead}.", field="model")


@router.post(
    "/predict",
    summary="text-embeddings-inference: labels with scores",
    response_model=list[LabelScore] | list[list[LabelScore]],
    responses=ENCODING_ERRORS,
)
async def predict(request: Request, unread: RequestBody[PredictBody]) -> Response:
    """Serve `POST /predict`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "classify"):
        served = runtime.service.encoder
        body = await unread.parse()
        is_batch, texts = body.inputs
    encoded, rows = await classify_texts(
        runtime.service, ClassifyQuery(texts, bool(body.raw_scores), body.truncation, "inputs"), request_id(request)
    )
    top_k = body.parameters.top_k if body.parameters else None
    predictions = [
        [{"score": score, "label": label} for label, score in labels_by_score(served, row)[:top_k]] for row in rows
    ]
    return json_response(to_json(predictions if is_batch else predictions[0]), encoded, token_header(encoded))


@router.post(
    "/similarity",
    summary="text-embeddings-inference: sentence similarity",
    response_model=list[float],
    responses=ENCODING_ERRORS,
)
async def similarity(request: Request, unread: RequestBody[SimilarityBody]) -> Response:
    """Serve `POST /similarity`: cosine similarities of one sentence to others."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018
        body = await unread.parse()
        parameters = body.parameters or SimilarityParameters()
        encoding = EncodingRequest(
            inputs=(body.inputs.source_sentence, *body.inputs.sentences),
            outputs=("embedding",),
            api="native",
            request_id=request_id(request),
            truncation=parameters.truncation,
            prompt=parameters.prompt_name,
            field="inputs",
        )
    encoded = await runtime.service.encode(encoding)
    vectors = to_numpy(encoded.arrays["embedding"])
    return json_response(to_json_list(paired_similarities(vectors[:1], vectors[1:])), encoded, token_header(encoded))


@router.post(
    "/embed_all",
    summary="text-embeddings-inference: embeddings of all tokens",
    response_model=list[list[list[float]]],
    responses=ENCODING_ERRORS,
)
async def embed_all(request: Request, unread: RequestBody[EmbedAllBody]) -> Response:
    """Serve `POST /embed_all`: a vector for each token."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018
        body = await unread.parse()
        encoding = native_encoding_request(body, "last_hidden_state", request)
    encoded = await runtime.service.encode(encoding)
    body_json = await join_with_pauses(b"[", _token_vectors(encoded), b"]")
    return json_response(body_json, encoded, token_header(encoded))


def _token_vectors(encoded: Encoded) -> Iterator[bytes]:
    """Yield the JSON of each text's list of vectors, a few tokens at a time.

    The event loop can run other tasks between them.
    """
    hidden = to_numpy(encoded.arrays["last_hidden_state"])
    for start, end in pairwise(accumulate(encoded.lengths, initial=0)):
        for first in range(start, end, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, end)
            rows = to_json_list(hidden[first:last])
            yield rows[first != start : len(rows) - (last != end)]


@router.post(
    "/decode",
    summary="text-embeddings-inference: texts of token ids",
    response_model=list[str],
    responses=router.failures(*BODY_ERRORS),
)
async def decode(request: Request, unread: RequestBody[DecodeBody]) -> Response:
    """Serve `POST /decode`, for every model with a tokenizer."""
    service = runtime_of(request).service
    with renamed_fields({"token_ids": "ids"}):
        body = await unread.parse()
        skips = body.skip_special_tokens is not False
        return JSONResponse([await service.detokenize(ids, skips) for ids in body.ids])


# ---- /info ---------------------------------------------------------------------------------------------------------

_DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_information(model: ServedModel, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference's `/info`, which the native response of `/info` has too.

    Args:
        model: The served model.
        plan: The serving plan as JSON: decisions by name, each with its `value`.
    """
    known: dict[str, Any] = {"model_id": model.name, "max_input_length": model.limits.max_model_len}
    if not isinstance(model, ServedEncoder):
        return known
    precision = str(plan.get("precision", {}).get("value", "fp32"))
    return known | {
        "model_sha": None,
        "model_dtype": _DTYPES.get(precision, precision),
        "model_type": _model_type(model),
        "max_concurrent_requests": model.limits.max_running_seqs + model.limits.max_waiting_requests,
        "max_batch_tokens": plan.get("max_batch_tokens", {}).get("value"),
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "tokenization_workers": model.limits.tokenizer_threads,
    }


def _model_type(model: ServedEncoder) -> dict[str, Any]:
    if not model.labels:
        return {"embedding": {"pooling": "_".join(model.config.pooling.modes)}}
    id2label = {str(place): label for place, label in enumerate(model.labels)}
    label2id = {label: place for place, label in enumerate(model.labels)}
    return {"reranker" if len(model.labels) == 1 else "classifier": {"id2label": id2label, "label2id": label2id}}
