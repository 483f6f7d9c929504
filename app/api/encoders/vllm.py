"""vLLM dialect of encoders: `/score` and `/pooling`. Its `/classify` is `/v1/classify` without the prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.encoders.routes import list_fields
from app.api.encoders.schemas import NON_EMPTY, ListResponse, NonEmptyText, PoolingFields, TokenLimit
from app.api.encoders.scoring import RelevanceQuery, score_relevance, text_inputs
from app.api.encoders.vectors import VECTOR_WRITERS, join_with_pauses, json_response
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, DialectRouter, RequestBody, check_model, count_refusals, request_id, runtime_of
from app.api.schemas import Int64, Texts
from app.errors import InvalidRequest, WrongModelKind
from app.metrics.instruments import Api
from app.service.requests import Encoded, EncodingRequest
from app.service.served_model import FloatArray, ServedEncoder, to_numpy

Queries = NonEmptyText | Annotated[tuple[NonEmptyText, ...], NON_EMPTY]
Documents = str | Annotated[tuple[str, ...], NON_EMPTY]  # one without text has a score too
# The pairs of names that vLLM's versions have had for the two sides.
_SIDES = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))
_OUTPUTS: Mapping[str, str] = {"embed": "embedding", "classify": "logits", "token_embed": "last_hidden_state"}


class ScoreBody(PoolingFields):
    """Body of `POST /score` and `/v1/score`: `queries` and `documents`, or the same under vLLM's older names.

    One query is scored with every document; as many queries as documents are scored in pairs.
    """

    API: ClassVar[Api] = "rerank"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "query": "send queries and documents here, or send query and documents to /rerank.",
        "texts": "send queries and documents here, or send query and texts to /rerank.",
        "inputs": "send queries and documents here, or send inputs to /similarity (text-embeddings-inference).",
    }

    queries: Queries | None = None
    documents: Documents | None = None
    items: Documents | None = None
    text_1: Queries | None = None
    text_2: Documents | None = None
    data_1: Queries | None = None
    data_2: Documents | None = None
    max_tokens_per_query: TokenLimit | None = None
    max_tokens_per_doc: TokenLimit | None = None

    def relevance_query(self) -> RelevanceQuery:
        """Return what to score. Raises `InvalidRequest` unless there are exactly two sides that belong together."""
        names = ("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        sides = next((pair for pair in _SIDES if set(pair) == set(given)), None)
        if sides is None:
            raise InvalidRequest("Send queries and documents, or text_1 and text_2.", field="queries")
        queries, documents = ((one,) if isinstance(one := given[name], str) else one for name in sides)
        raw_scores = self.use_activation is False
        truncation = replace(
            self.truncation,
            max_query_tokens=self.max_tokens_per_query or 0,
            max_document_tokens=self.max_tokens_per_doc or 0,
        )
        return RelevanceQuery(queries, documents, raw_scores, truncation, sides[1], sides[0])


class PoolingBody(PoolingFields):
    """Body of `POST /pooling`. Without `task` an embedding model embeds, and any other classifies."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send input here, or send inputs to /embed or /embed_all (text-embeddings-inference).",
        "messages": "send input here; an encoder reads texts and no conversations.",
        "texts": "send input here, or send texts to /v2/embed (Cohere).",
    }

    input: Texts
    task: Literal["embed", "classify", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None


class ScoreObject(TypedDict):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ListResponse):
    """Response of `POST /score`, in the order of the documents."""

    data: list[ScoreObject]


class PoolingObject(TypedDict):
    """The vector or the scores of one text, or the vectors of its tokens; or the base64 of little-endian FP32."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(ListResponse):
    """Response of `POST /pooling`."""

    data: list[PoolingObject]


router = DialectRouter("vLLM", OPENAI_ERRORS)
ENCODING_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/v1/score",
    summary="vLLM: scores of pairs of texts",
    response_model=ScoreResponse,
    responses=ENCODING_ERRORS,
)
async def score(request: Request, unread: RequestBody[ScoreBody]) -> Response:
    """Serve `POST /v1/score` and `/score`."""
    found = await score_relevance(request, unread.parse)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found.scores)]
    return json_response(to_json(list_fields("score", found.served, found.encoded) | {"data": data}), found.encoded)


@router.post(
    "/pooling",
    summary="vLLM: vectors, scores, or the vectors of all tokens",
    response_model=PoolingResponse,
    responses=ENCODING_ERRORS,
)
async def pooling(request: Request, unread: RequestBody[PoolingBody]) -> Response:
    """Serve `POST /pooling`."""
    runtime = runtime_of(request)
    with count_refusals(runtime.metrics, "embeddings"):
        served = runtime.service.encoder
        body = await unread.parse()
        check_model(runtime, body.model)
        output = _requested_output(served, body.task)
        encoding = EncodingRequest(
            inputs=text_inputs(body.input),
            outputs=(output,),
            api="embeddings",
            request_id=request_id(request),
            truncation=body.truncation,
            normalize=body.use_activation,
            dimensions=body.dimensions,
        )
    encoded = await runtime.service.encode(encoding)
    arrays = encoded.arrays[output]
    if output == "logits" and body.use_activation is not False:
        arrays = served.scores(arrays)
    write = VECTOR_WRITERS[body.encoding_format or "float"]
    items = [
        await _item(b'{"index":%d,"object":"pooling","data":' % index, values, write)
        for index, values in enumerate(_values_by_text(output, to_numpy(arrays), encoded))
    ]
    head = to_json(list_fields("pool", served, encoded))[:-1] + b',"data":['
    return json_response(await join_with_pauses(head, items, b"]}"), encoded)


async def _item(head: bytes, values: FloatArray, write: Callable[[FloatArray], bytes]) -> bytes:
    """Return the JSON of one text. Many rows are written one by one, between which the event loop runs other tasks."""
    if values.ndim == 1 or write is not VECTOR_WRITERS["float"]:
        return head + write(values) + b"}"
    return await join_with_pauses(head + b"[", map(write, values), b"]}")


def _requested_output(served: ServedEncoder, task: str | None) -> str:
    if task is None:
        return next(iter(served.sizes))
    output = _OUTPUTS[task]
    if output not in served.sizes:
        known = ", ".join(name for name, each in _OUTPUTS.items() if each in served.sizes)
        raise WrongModelKind(f"{served.name!r} has no output for the task {task!r}; it has: {known}.", field="task")
    return output


def _values_by_text(output: str, values: FloatArray, encoded: Encoded) -> Iterator[Any]:
    """Yield each text's row, or its rows if there is one for each token."""
    if output != "last_hidden_state":
        yield from values
        return
    for start, end in pairwise(accumulate(encoded.lengths, initial=0)):
        yield values[start:end]
