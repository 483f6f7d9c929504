"""Rerank (Cohere's and Jina's format) and classify endpoints, and the scoring that other dialects share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from app.api.dependencies import check_model, counting_refusals, read_body, request_id, runtime_of
from app.api.embeddings import answered
from app.api.encoder_schemas import ClassifyBody, RerankBody
from app.encoding import Encoded, EncodingRequest, TextInput
from app.errors import WrongModelKind
from app.metrics import Api
from app.scores import cosines, floats
from app.served import ServedEncoder
from app.service import Service


@dataclass(frozen=True, slots=True)
class Cut:
    """Handling of a text that is too long."""

    truncate: bool = False
    keeps_end: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """Documents to be ranked against a query. `field` is the dialect's name for the documents."""

    query: str
    documents: tuple[str, ...]
    raw_scores: bool
    cut: Cut
    field: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts or pairs to be classified. `field` is the dialect's name for them."""

    texts: tuple[str | tuple[str, str], ...]
    raw_scores: bool
    cut: Cut
    field: str


Scored = list[tuple[str, float]]  # labels with their scores, best first


async def rerank(request: Request) -> Response:
    """Serve `POST /v1/rerank`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "rerank"):
        served = runtime.service.encoder
        body = await read_body(request, RerankBody)
        check_model(runtime.service, body.model)
        texts = body.texts
        wanted = relevance_request(
            served, Question(body.query, texts, bool(body.raw_scores), Cut(bool(body.truncate)), "documents"), request_id(request)
        )
    encoded = await runtime.service.encode(wanted)
    ranked = best_first(relevances(served, encoded, bool(body.raw_scores)))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
    if body.return_documents:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    number = encoded.usage.prompt_tokens
    usage = {"prompt_tokens": number, "total_tokens": number}
    said = {"id": f"rerank-{uuid.uuid4().hex}", "model": served.name, "results": results, "usage": usage}
    return answered(to_json(said), encoded)


async def classify(request: Request) -> Response:
    """Serve `POST /v1/classify`."""
    runtime = runtime_of(request)
    with counting_refusals(runtime.metrics, "classify"):
        served = runtime.service.encoder
        body = await read_body(request, ClassifyBody)
        check_model(runtime.service, body.model)
        asked = Labelled(body.texts, bool(body.raw_scores), Cut(bool(body.truncate)), "input")
    encoded, scored = await labels_of(runtime.service, asked, request_id(request))
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
    return answered(to_json({"object": "list", "data": data, "model": served.name, "usage": usage}), encoded)


# ---- shared with other dialects ------------------------------------------------------------------------------------


def relevance_request(served: ServedEncoder, question: Question, identity: str) -> EncodingRequest:
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
    pairs = tuple((question.query, document) for document in question.documents)
    inputs: tuple[TextInput, ...] = pairs if served.labels else (question.query, *question.documents)
    return EncodingRequest(
        inputs=inputs,
        outputs=("logits",) if served.labels else ("embedding",),
        api="rerank",
        request_id=identity,
        truncate=question.cut.truncate,
        keeps_end=question.cut.keeps_end,
        num_queries=0 if served.labels else 1,
        field=question.field,
    )


def relevances(served: ServedEncoder, encoded: Encoded, raw_scores: bool) -> list[float]:
    """Return one relevance per document.

    It is a cross-encoder's score, or its logit with `raw_scores`, or the cosine similarity for an embedding
    model.
    """
    if not served.labels:
        vectors = floats(encoded.arrays["embedding"])
        return [float(score) for score in cosines(vectors[:1], vectors[1:])[0]]
    logits = encoded.arrays["logits"]
    return [float(score) for score in floats(logits if raw_scores else served.scores(logits))[:, 0]]


def best_first(scores: list[float]) -> list[tuple[int, float]]:
    """Return (index, score) pairs, best first; equal scores keep their order."""
    return sorted(enumerate(scores), key=lambda ranked: -ranked[1])


async def labels_of(service: Service, asked: Labelled, identity: str, api: Api = "classify") -> tuple[Encoded, list[Scored]]:
    """Classify the texts and return all labels of each text with scores, best first."""
    served = service.encoder
    wanted = EncodingRequest(
        inputs=asked.texts,
        outputs=("logits",),
        api=api,
        request_id=identity,
        truncate=asked.cut.truncate,
        keeps_end=asked.cut.keeps_end,
        field=asked.field,
    )
    encoded = await service.encode(wanted)
    logits = encoded.arrays["logits"]
    rows = floats(logits if asked.raw_scores else served.scores(logits)).tolist()
    return encoded, [[(served.labels[place], score) for place, score in best_first(row)] for row in rows]
