"""SageMaker's route: one path to which a client sends a chat, a completion, embeddings, scores or a reranking.

A hosting service calls a container at `/invocations` alone. As in vLLM, the fields of the body tell what it is; it is
then served as on the route of its kind.
"""

from __future__ import annotations

from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from starlette.requests import Request
from starlette.responses import Response

from app.api.encoders.rerank import RerankBody, RerankResponse, rerank
from app.api.encoders.routes import embeddings
from app.api.encoders.schemas import EmbeddingsBody, EmbeddingsResponse
from app.api.encoders.vllm import ScoreBody, ScoreResponse, score
from app.api.openai.routes import GENERATION_ERRORS, chat_completions, completions
from app.api.openai.schemas import (
    OPENAI_ERRORS,
    ChatBody,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionBody,
    TextCompletion,
)
from app.api.routing import DialectRouter, RequestBody, UnreadBody
from app.api.schemas import Body
from app.errors import InvalidRequest

router = DialectRouter("SageMaker", OPENAI_ERRORS)


class InvocationsBody(Body):
    """Body of `POST /invocations`: one of these fields, and the others of the route that takes it."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema for the OpenAPI document, which allows the other fields."""
        return super().__get_pydantic_json_schema__(core_schema, handler) | {"additionalProperties": True}


@router.post(
    "/invocations",
    summary="SageMaker: a chat, a completion, embeddings, scores or a reranking",
    response_model=ChatCompletion | TextCompletion | EmbeddingsResponse | ScoreResponse | RerankResponse,
    responses=GENERATION_ERRORS | router.event_stream(ChatCompletionChunk, last="[DONE]"),
    response_description="The response of the route for this body; with `stream`, events that end with `[DONE]`.",
)
async def invocations(request: Request, unread: RequestBody[InvocationsBody]) -> Response:
    """Serve `POST /invocations`. A chat may have other fields' names in its tools, so messages are looked for first."""
    if await unread.has_field("messages"):
        return await chat_completions(request, UnreadBody(request, ChatBody))
    if await unread.has_field("prompt"):
        return await completions(request, UnreadBody(request, CompletionBody))
    if await unread.has_field("query"):
        return await rerank(request, UnreadBody(request, RerankBody))
    if await unread.has_field("input"):
        return await embeddings(request, UnreadBody(request, EmbeddingsBody))
    for name in ("queries", "text_1", "data_1"):
        if await unread.has_field(name):
            return await score(request, UnreadBody(request, ScoreBody))
    raise InvalidRequest(
        "Send messages, prompt, input, query with documents, or queries with documents: they tell what to do.",
        field="messages",
    )
