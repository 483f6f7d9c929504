"""Relevance of documents to a query: Cohere's, Jina's, vLLM's and text-embeddings-inference's bodies on the same routes.

A body with `documents` gets the response that Cohere, Jina and vLLM share; a body with `texts` gets a list of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.encoders.cohere import COHERE_ERRORS, CohereMeta, response_meta
from app.api.encoders.schemas import NON_EMPTY, EncoderUsage, NonEmptyText, TokenLimit, TruncationFields, truncation_to
from app.api.encoders.scoring import RelevanceQuery, score_relevance, sort_by_score
from app.api.encoders.vectors import json_response, token_header
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, answer_errors_as, new_response_id
from app.api.schemas import LEAVE_OUT, Body, Int64, Refusal, refused
from app.api.tei import TEI_ERRORS
from app.errors import InvalidRequest
from app.metrics.instruments import Api
from app.service.requests import Truncation


class Document(Body):
    """A document given as an object."""

    text: str


class RerankBody(TruncationFields):
    """Body of the rerank routes: `documents` (Cohere, Jina, vLLM) or `texts` (text-embeddings-inference, llama.cpp).

    With documents, `truncate` and `raw_scores` are extensions.
    """

    API: ClassVar[Api] = "rerank"
    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(
        LEAVE_OUT,
        rank_fields=([], ["text"]),
        max_chunks_per_doc=(),
        add_special_tokens=True,
        instruction=(),
        instruct=(),
        images=([],),
    )
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send query with documents or texts here, or send inputs to /similarity or /predict.",
        "queries": "send one query here, or send queries and documents to /score.",
        "text_1": "send query with documents here, or send text_1 and text_2 to /score.",
    }

    query: NonEmptyText
    documents: Annotated[tuple[str | Document, ...], NON_EMPTY] | None = None
    texts: Annotated[tuple[str, ...], NON_EMPTY] | None = None
    model: str | None = None
    top_n: Annotated[Int64, Field(ge=1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_query: TokenLimit | None = None
    max_tokens_per_doc: TokenLimit | None = None

    def relevance_query(self) -> RelevanceQuery:
        """Return what to score. Raises `InvalidRequest` unless there are either documents or texts."""
        if (self.documents is None) == (self.texts is None):
            raise InvalidRequest(
                "Send either documents (Cohere, Jina, vLLM), or texts (text-embeddings-inference).", field="documents"
            )
        given = self.texts or tuple(each if isinstance(each, str) else each.text for each in self.documents or ())
        raw_scores = bool(self.raw_scores) or self.use_activation is False
        truncation = replace(
            self.truncation,
            max_query_tokens=self.max_tokens_per_query or 0,
            max_document_tokens=self.max_tokens_per_doc or 0,
        )
        field = "documents" if self.texts is None else "texts"
        return RelevanceQuery((self.query,), given, raw_scores, truncation, field)

    @property
    def truncation(self) -> Truncation:
        """Handling of texts that are too long, by either dialect's fields."""
        left = self.truncation_side == "left" or super().truncation.left
        return truncation_to(self.truncate_prompt_tokens, bool(self.truncate), left)


class DocumentText(TypedDict):
    """The text of a ranked document."""

    text: str


class RerankResult(TypedDict):
    """A document's place in the request and its relevance; its text with `return_documents`."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class RerankResponse(TypedDict):
    """Response for `documents`, best first: `meta` is Cohere's, `usage` Jina's and vLLM's."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncoderUsage
    meta: CohereMeta


class RankedText(TypedDict):
    """A text's place in the request and its score, best first; the text itself with `return_text`."""

    index: int
    score: float
    text: NotRequired[str]


openai_router = DialectRouter("OpenAI", OPENAI_ERRORS)
cohere_router = DialectRouter("Cohere", COHERE_ERRORS)
tei_router = DialectRouter("text-embeddings-inference", TEI_ERRORS)
_STATUSES = (*BODY_ERRORS, 404, 504)


@cohere_router.post(
    "/v2/rerank",
    summary="Cohere: rank documents by relevance to a query",
    response_model=RerankResponse | list[RankedText],
    responses=cohere_router.failures(*_STATUSES),
)
@openai_router.post(
    "/v1/rerank",
    summary="Cohere, Jina, vLLM: rank documents by relevance to a query",
    response_model=RerankResponse | list[RankedText],
    responses=openai_router.failures(*_STATUSES),
)
async def rerank(request: Request, unread: RequestBody[RerankBody]) -> Response:
    """Serve the rerank routes."""
    found = await score_relevance(request, unread.parse)
    body, encoded = found.body, found.encoded
    ranked = sort_by_score(found.scores)[: body.top_n]
    if body.texts is not None:
        ranks: list[dict[str, Any]] = [{"index": index, "score": score} for index, score in ranked]
        if body.return_text:
            ranks = [rank | {"text": body.texts[rank["index"]]} for rank in ranks]
        return json_response(to_json(ranks), encoded, token_header(encoded))
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
    if body.return_documents:
        results = [result | {"document": {"text": found.query.documents[result["index"]]}} for result in results]
    number = encoded.usage.prompt_tokens
    response_body = {
        "id": new_response_id("rerank-"),
        "model": found.served.name,
        "results": results,
        "usage": {"prompt_tokens": number, "total_tokens": number},
        "meta": response_meta(request, encoded),
    }
    return json_response(to_json(response_body), encoded)


@tei_router.post(
    "/rerank",
    summary="text-embeddings-inference, Jina, vLLM: rank texts or documents by relevance",
    response_model=RerankResponse | list[RankedText],
    responses=tei_router.failures(*_STATUSES, also=OPENAI_ERRORS),
)
async def rerank_without_prefix(request: Request, unread: RequestBody[RerankBody]) -> Response:
    """Serve `POST /rerank`. A body with documents gets errors in the format of `/v1/rerank`."""
    if await unread.has_field("documents"):
        answer_errors_as(request, OPENAI_ERRORS)
    return await rerank(request, unread)
