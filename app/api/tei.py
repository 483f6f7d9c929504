"""text-embeddings-inference dialect: predict, rerank, similarity and embed_all, with their request bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.encoders.routes import (
    ClassifyQuery,
    RerankQuery,
    Truncation,
    classify_texts,
    join_with_pauses,
    json_response,
    native_encoding_request,
    relevance_scores,
    rerank_encoding_request,
    sort_by_score,
    to_json_list,
)
from app.api.encoders.schemas import NON_EMPTY, LabelScore, NonEmptyText, TextsBody, TruncationFields
from app.api.errors import ErrorFormat, HttpError
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, count_refusals, request_id, runtime_of
from app.api.schemas import Body
from app.service.requests import Encoded, EncodingRequest
from app.service.served_model import cosine_similarities, to_numpy

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


class PredictBody(TruncationFields):
    """Body of `POST /predict`."""

    inputs: PredictInput
    raw_scores: bool | None = None


class RankBody(TruncationFields):
    """Body of `POST /rerank`."""

    query: NonEmptyText
    texts: Annotated[tuple[str, ...], NON_EMPTY]
    raw_scores: bool | None = None
    return_text: bool | None = None


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

    inputs: Sentences
    parameters: SimilarityParameters | None = None


class TeiError(TypedDict):
    """Error body of text-embeddings-inference."""

    error: str
    error_type: str


class RankedText(TypedDict):
    """A text's place in the request and its score, best first; the text itself with `return_text`."""

    index: int
    score: float
    text: NotRequired[str]


def _error_body(error: HttpError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "Backend" if error.status >= 500 else "Validation")
    return {"error": error.message, "error_type": kind}


_ERROR_TYPES: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}
TEI_ERRORS = ErrorFormat(_error_body, TeiError)
CHUNK_TOKENS = 16
router = DialectRouter("text-embeddings-inference", TEI_ERRORS)
ENCODING_ERRORS = router.failures(*BODY_ERRORS, 504)


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
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await unread.parse()
        is_batch, texts = body.inputs
    encoded, scored = await classify_texts(
        runtime.service, ClassifyQuery(texts, bool(body.raw_scores), _truncation(body), "inputs"), request_id(request)
    )
    body_rows = [[{"score": score, "label": label} for label, score in scores] for scores in scored]
    return _response(to_json(body_rows if is_batch else body_rows[0]), encoded)


@router.post(
    "/rerank",
    summary="text-embeddings-inference: rank texts by relevance",
    response_model=list[RankedText],
    responses=ENCODING_ERRORS,
)
async def rerank(request: Request, unread: RequestBody[RankBody]) -> Response:
    """Serve `POST /rerank`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "rerank"):
        served = runtime.service.encoder
        body = await unread.parse()
        query = RerankQuery(body.query, body.texts, bool(body.raw_scores), _truncation(body), "texts")
        encoding = rerank_encoding_request(served, query, request_id(request))
    encoded = await runtime.service.encode(encoding)
    ranked = sort_by_score(relevance_scores(served, encoded, query.raw_scores))
    ranks: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in ranked]
    if body.return_text:
        ranks = [rank | {"text": body.texts[rank["index"]]} for rank in ranks]
    return _response(to_json(ranks), encoded)


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
            truncate=bool(parameters.truncate),
            truncate_left=parameters.truncate_left,
            prompt=parameters.prompt_name,
            field="inputs",
        )
    encoded = await runtime.service.encode(encoding)
    vectors = to_numpy(encoded.arrays["embedding"])
    return _response(to_json_list(cosine_similarities(vectors[:1], vectors[1:])[0]), encoded)


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
    return _response(await join_with_pauses(b"[", _token_vectors(encoded), b"]"), encoded)


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


def _truncation(body: TruncationFields) -> Truncation:
    return Truncation(bool(body.truncate), body.truncate_left)


def _response(body: bytes, encoded: Encoded) -> Response:
    """Return a response with the usage in a header, as text-embeddings-inference does.

    These bodies have no field for it.
    """
    return json_response(body, encoded, {"x-compute-tokens": str(encoded.usage.prompt_tokens)})
