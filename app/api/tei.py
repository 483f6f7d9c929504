"""text-embeddings-inference dialect: predict, rerank, similarity and embed_all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.dependencies import counting_refusals, read_body, request_id, runtime_of
from app.api.embeddings import answered, wanted_of
from app.api.encoder_schemas import CutFields
from app.api.rerank import Cut, Labelled, Question, best_first, labels_of, relevance_request, relevances
from app.api.tei_schemas import EmbedAllBody, PredictBody, RankBody, SimilarityBody, SimilarityParameters
from app.api.vectors import joined, json_list
from app.encoding import Encoded, EncodingRequest
from app.scores import cosines, floats

PIECE_TOKENS = 16


async def predict(request: Request) -> Response:
    """Serve `POST /predict`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "classify"):
        runtime.service.encoder  # noqa: B018  # another kind of model is refused whatever the body is
        body = await read_body(request, PredictBody)
        many, texts = body.inputs
    encoded, scored = await labels_of(
        runtime.service, Labelled(texts, bool(body.raw_scores), _cut(body), "inputs"), request_id(request)
    )
    said = [[{"score": score, "label": label} for label, score in scores] for scores in scored]
    return _answered(to_json(said if many else said[0]), encoded)


async def rerank(request: Request) -> Response:
    """Serve `POST /rerank`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "rerank"):
        served = runtime.service.encoder
        body = await read_body(request, RankBody)
        question = Question(body.query, body.texts, bool(body.raw_scores), _cut(body), "texts")
        wanted = relevance_request(served, question, request_id(request))
    encoded = await runtime.service.encode(wanted)
    ranked = best_first(relevances(served, encoded, question.raw_scores))
    ranks: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in ranked]
    if body.return_text:
        ranks = [rank | {"text": body.texts[rank["index"]]} for rank in ranks]
    return _answered(to_json(ranks), encoded)


async def similarity(request: Request) -> Response:
    """Serve `POST /similarity`: cosine similarities of one sentence to others."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018
        body = await read_body(request, SimilarityBody)
        parameters = body.parameters or SimilarityParameters()
        wanted = EncodingRequest(
            inputs=(body.inputs.source_sentence, *body.inputs.sentences),
            outputs=("embedding",),
            api="native",
            request_id=request_id(request),
            truncate=bool(parameters.truncate),
            keeps_end=parameters.keeps_end,
            prompt=parameters.prompt_name,
            field="inputs",
        )
    encoded = await runtime.service.encode(wanted)
    vectors = floats(encoded.arrays["embedding"])
    return _answered(json_list(cosines(vectors[:1], vectors[1:])[0]), encoded)


async def embed_all(request: Request) -> Response:
    """Serve `POST /embed_all`: a vector for each token."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "native"):
        runtime.service.encoder  # noqa: B018
        body = await read_body(request, EmbedAllBody)
        wanted = wanted_of(body, "last_hidden_state", request)
    encoded = await runtime.service.encode(wanted)
    return _answered(await joined(b"[", _all_tokens(encoded), b"]"), encoded)


def _all_tokens(encoded: Encoded) -> Iterator[bytes]:
    """Yield the JSON of each text's list of vectors, a few tokens at a time.

    The event loop can run other tasks between them.
    """
    hidden = floats(encoded.arrays["last_hidden_state"])
    for start, end in pairwise(accumulate(encoded.lengths, initial=0)):
        for first in range(start, end, PIECE_TOKENS):
            last = min(first + PIECE_TOKENS, end)
            rows = json_list(hidden[first:last])
            yield rows[first != start : len(rows) - (last != end)]


def _cut(body: CutFields) -> Cut:
    return Cut(bool(body.truncate), body.keeps_end)


def _answered(body: bytes, encoded: Encoded) -> Response:
    """Return a response with the usage in a header, as text-embeddings-inference does.

    These bodies have no field for it.
    """
    return answered(body, encoded, {"x-compute-tokens": str(encoded.usage.prompt_tokens)})
