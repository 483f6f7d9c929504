"""Relevance and labels, for all dialects: the encoding requests and the scores of their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.requests import Request

from app.api.routing import check_model, count_refusals, request_id, runtime_of
from app.errors import InvalidRequest, WrongModelKind
from app.messages import Text
from app.service.requests import Encoded, EncodingRequest, TextInput, Truncation
from app.service.served_model import ServedEncoder, paired_similarities, to_numpy
from app.service.service import Service


@dataclass(frozen=True, slots=True)
class RelevanceQuery:
    """Pairs of a query and a document: one query for all documents, or one for each.

    The fields are the dialect's names for both, used in error messages.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    raw_scores: bool
    truncation: Truncation
    field: str
    query_field: str = "query"


@dataclass(frozen=True, slots=True)
class ClassifyQuery:
    """Texts or pairs to be classified. `field` is the dialect's name for them."""

    texts: tuple[str | tuple[str, str], ...]
    raw_scores: bool
    truncation: Truncation
    field: str


def relevance_request(served: ServedEncoder, query: RelevanceQuery, identity: str) -> EncodingRequest:
    """Return the encoding request for the relevance of documents.

    For a cross-encoder, query and document are one text. For an embedding model, the queries and the documents are
    separate texts.

    Raises:
        WrongModelKind: The model has several labels.
        InvalidRequest: There are several queries, and not as many as documents.
    """
    if len(served.labels) > 1:
        raise WrongModelKind(
            f"{served.name!r} has {len(served.labels)} labels, and relevance is one score: use /v1/classify, "
            "or serve a cross-encoder or an embedding model.",
            field="model",
        )
    num_queries, num_documents = len(query.queries), len(query.documents)
    if num_queries not in (1, num_documents):
        raise InvalidRequest(
            f"{query.query_field} takes 1 text, or as many as {query.field}, which are {num_documents}: not {num_queries}.",
            field=query.query_field,
        )
    queries = query.queries * num_documents if num_queries == 1 else query.queries
    pairs = tuple(zip(queries, query.documents, strict=True))
    inputs: tuple[TextInput, ...] = pairs if served.labels else (*query.queries, *query.documents)
    return EncodingRequest(
        inputs=inputs,
        outputs=("logits",) if served.labels else ("embedding",),
        api="rerank",
        request_id=identity,
        truncation=query.truncation,
        num_queries=0 if served.labels else num_queries,
        field=query.field,
        query_field=query.query_field,
    )


class RelevanceBody(Protocol):
    """A body of a route that scores pairs of texts."""

    @property
    def model(self) -> str | None:
        """The model that the client names."""

    def relevance_query(self) -> RelevanceQuery:
        """Return the pairs. Raises `InvalidRequest` if the fields do not go together."""


RelevanceBodyT = TypeVar("RelevanceBodyT", bound=RelevanceBody)


@dataclass(frozen=True, slots=True)
class Relevance(Generic[RelevanceBodyT]):
    """A request for the relevance of documents, and its result: one score for each document."""

    served: ServedEncoder
    body: RelevanceBodyT
    query: RelevanceQuery
    encoded: Encoded
    scores: list[float]


async def score_relevance(
    request: Request, parse: Callable[[], Awaitable[RelevanceBodyT]]
) -> Relevance[RelevanceBodyT]:
    """Read a body and return its pairs with their scores. `parse` is called if the served model is an encoder."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "rerank"):
        served = runtime.service.encoder
        body = await parse()
        check_model(runtime, body.model)
        query = body.relevance_query()
        encoding = relevance_request(served, query, request_id(request))
    encoded = await runtime.service.encode(encoding)
    return Relevance(served, body, query, encoded, relevance_scores(served, encoded, query))


def relevance_scores(served: ServedEncoder, encoded: Encoded, query: RelevanceQuery) -> list[float]:
    """Return one relevance per document.

    It is a cross-encoder's score, or its logit with `raw_scores`, or the cosine similarity for an embedding
    model.
    """
    if not served.labels:
        vectors, number = to_numpy(encoded.arrays["embedding"]), len(query.queries)
        return [float(score) for score in paired_similarities(vectors[:number], vectors[number:])]
    logits = encoded.arrays["logits"]
    return [float(score) for score in to_numpy(logits if query.raw_scores else served.scores(logits))[:, 0]]


def text_inputs(given: Iterable[str | tuple[int, ...]]) -> tuple[TextInput, ...]:
    """Convert a body's inputs: texts are kept, lists of token ids become a `Text`."""
    return tuple(one if isinstance(one, str) else Text(one) for one in given)


def sort_by_score(scores: list[float]) -> list[tuple[int, float]]:
    """Return (index, score) pairs, best first; equal scores keep their order."""
    return sorted(enumerate(scores), key=lambda ranked: -ranked[1])


def labels_by_score(served: ServedEncoder, scores: list[float]) -> list[tuple[str, float]]:
    """Return the labels with the scores of one text, best first."""
    return [(served.labels[place], score) for place, score in sort_by_score(scores)]


async def classify_texts(service: Service, query: ClassifyQuery, identity: str) -> tuple[Encoded, list[list[float]]]:
    """Classify the texts and return each text's scores in the order of the labels."""
    served = service.encoder
    encoding = EncodingRequest(
        inputs=query.texts,
        outputs=("logits",),
        api="classify",
        request_id=identity,
        truncation=query.truncation,
        field=query.field,
    )
    encoded = await service.encode(encoding)
    logits = encoded.arrays["logits"]
    rows: list[list[float]] = to_numpy(logits if query.raw_scores else served.scores(logits)).tolist()
    return encoded, rows
