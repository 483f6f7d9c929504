"""Cohere dialect: embeddings in both versions of its API. Its rerank routes are in `rerank.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import numpy
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from app.api.encoders.schemas import NON_EMPTY
from app.api.encoders.vectors import join_with_pauses, json_response, to_base64_json, to_json_list
from app.api.errors import ErrorFormat, HttpError
from app.api.routing import (
    BODY_ERRORS,
    DialectRouter,
    RequestBody,
    UnreadBody,
    check_model,
    count_refusals,
    new_response_id,
    renamed_fields,
    request_id,
    runtime_of,
)
from app.api.schemas import LEAVE_OUT, Body, Int64, Refusal, refused
from app.errors import InvalidRequest
from app.metrics.instruments import Api
from app.service.requests import Encoded, EncodingRequest, Truncation
from app.service.served_model import FloatArray, ServedEncoder, to_numpy

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
# Names of a checkpoint's prompts for each use of the vectors, in the order in which they are looked for.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class CohereEmbedBody(Body):
    """Body of `POST /v1/embed`. Long texts are truncated at their end unless `truncate` says otherwise.

    int8 and uint8 vectors are refused: their ranges come from a calibration that a checkpoint does not have.
    """

    API: ClassVar[Api] = "embeddings"
    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(LEAVE_OUT, images=([],), max_tokens=(), output_dimension=())
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "input": "send texts here, or send input to /v1/embeddings (OpenAI).",
        "inputs": "send texts here, or send inputs to /embed (text-embeddings-inference).",
    }

    texts: Annotated[tuple[str, ...], NON_EMPTY]
    model: str | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: Annotated[tuple[EmbeddingType, ...], Field(fail_fast=True, max_length=4)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None

    @property
    def given_texts(self) -> tuple[str, ...]:
        """The texts, in order."""
        return self.texts

    @property
    def dimensions(self) -> int | None:
        """Number of dimensions; None means all."""
        return None


class CohereTextPart(Body):
    """A text of an input."""

    type: Literal["text"]
    text: str


class CohereInput(Body):
    """An input of one text."""

    content: Annotated[tuple[CohereTextPart, ...], Field(fail_fast=True, min_length=1, max_length=1)]


class CohereEmbedV2Body(CohereEmbedBody):
    """Body of `POST /v2/embed`: `texts`, or `inputs` of one text each."""

    FOREIGN: ClassVar[Mapping[str, str]] = {"input": CohereEmbedBody.FOREIGN["input"]}

    texts: Annotated[tuple[str, ...], NON_EMPTY] | None = None  # type: ignore[assignment]  # version 1 requires it
    inputs: Annotated[tuple[CohereInput, ...], NON_EMPTY] | None = None
    output_dimension: Int64 | None = None

    @property
    def given_texts(self) -> tuple[str, ...]:
        """The texts, in order. Raises `InvalidRequest` unless there are either texts or inputs."""
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("Send either texts, or inputs of one text each.", field="texts")
        return self.texts or tuple(each.content[0].text for each in self.inputs or ())

    @property
    def dimensions(self) -> int | None:
        """Number of dimensions; None means all."""
        return self.output_dimension


# ---- errors and responses ------------------------------------------------------------------------------------------


class CohereError(TypedDict):
    """Error body of Cohere's API."""

    message: str


class CohereVersion(TypedDict):
    """Version of Cohere's API."""

    version: str


class CohereTokens(TypedDict):
    """Tokens of the texts."""

    input_tokens: int


class CohereUnits(CohereTokens):
    """Tokens by the kinds that Cohere bills. An embedding of texts has no tokens of images."""

    image_tokens: NotRequired[int]


class CohereMeta(TypedDict):
    """Information about the request."""

    api_version: CohereVersion
    billed_units: CohereUnits
    tokens: CohereTokens


class CohereEmbeddings(TypedDict, total=False):
    """Vectors by the requested types."""

    float: list[list[float]]
    base64: list[str]
    binary: list[list[int]]
    ubinary: list[list[int]]


class CohereEmbedResponse(TypedDict):
    """Response of Cohere's embed routes. Without `embedding_types`, version 1 returns numbers alone."""

    id: str
    response_type: NotRequired[Literal["embeddings_floats", "embeddings_by_type"]]
    embeddings: list[list[float]] | CohereEmbeddings
    texts: list[str]
    meta: CohereMeta


def _error_body(error: HttpError) -> dict[str, Any]:
    return {"message": error.message}


COHERE_ERRORS = ErrorFormat(_error_body, CohereError)
router = DialectRouter("Cohere", COHERE_ERRORS)
ENCODING_ERRORS = router.failures(*BODY_ERRORS, 404, 504)


@router.post(
    "/v1/embed",
    summary="Cohere: embeddings of texts, version 1",
    response_model=CohereEmbedResponse,
    responses=ENCODING_ERRORS,
)
async def embed(request: Request, unread: RequestBody[CohereEmbedBody]) -> Response:
    """Serve `POST /v1/embed`."""
    return await _embed(request, unread, 1)


@router.post(
    "/v2/embed",
    summary="Cohere: embeddings of texts",
    response_model=CohereEmbedResponse,
    responses=ENCODING_ERRORS,
)
async def embed_v2(request: Request, unread: RequestBody[CohereEmbedV2Body]) -> Response:
    """Serve `POST /v2/embed`."""
    return await _embed(request, unread, 2)


async def _embed(
    request: Request, unread: UnreadBody[CohereEmbedBody] | UnreadBody[CohereEmbedV2Body], version: int
) -> Response:
    runtime = runtime_of(request)
    with renamed_fields({"dimensions": "output_dimension"}):
        with count_refusals(runtime.metrics, "embeddings"):
            served = runtime.service.encoder
            body = await unread.parse()
            check_model(runtime, body.model)
            texts, kinds = body.given_texts, body.embedding_types or ("float",)
            _check_binary(served, kinds, body.dimensions)
            encoding = EncodingRequest(
                inputs=texts,
                outputs=("embedding",),
                api="embeddings",
                request_id=request_id(request),
                truncation=Truncation(body.truncate != "NONE", left=body.truncate == "START"),
                dimensions=body.dimensions,
                prompt=_prompt(served, body.input_type),
                field="texts",
            )
        encoded = await runtime.service.encode(encoding)
    vectors = to_numpy(encoded.arrays["embedding"])
    if version == 1 and body.embedding_types is None:
        response_type, written = "embeddings_floats", await join_with_pauses(b"[", _rows("float", vectors), b"]")
    else:
        parts = [
            await join_with_pauses(b'"%b":[' % kind.encode(), _rows(kind, vectors), b"]")
            for kind in dict.fromkeys(kinds)
        ]
        response_type, written = "embeddings_by_type", b"{%b}" % b",".join(parts)
    meta = response_meta(request, encoded)
    meta["billed_units"] = meta["billed_units"] | ({"image_tokens": 0} if version == 2 else {})
    fields: dict[str, Any] = {"id": new_response_id(""), "texts": texts, "meta": meta}
    fields |= {"response_type": response_type} if version == 1 else {}
    return json_response(b'%b,"embeddings":%b}' % (to_json(fields)[:-1], written), encoded)


def response_meta(request: Request, encoded: Encoded) -> dict[str, Any]:
    """Return the `meta` of a response, with the version that the path names."""
    tokens = {"input_tokens": encoded.usage.prompt_tokens}
    version = "2" if request.scope["path"].startswith("/v2/") else "1"
    return {"api_version": {"version": version}, "billed_units": tokens, "tokens": tokens}


def _prompt(served: ServedEncoder, input_type: str | None) -> str | None:
    """Return the name of the checkpoint's prompt for a use of the vectors; None means the default one."""
    prompts = served.config.pooling.prompts
    return next((name for name in _PROMPTS.get(input_type or "", ()) if name in prompts), None)


def _check_binary(served: ServedEncoder, kinds: tuple[str, ...], dimensions: int | None) -> None:
    size = dimensions or served.sizes.get("embedding", 0)
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(kinds):
        raise InvalidRequest(
            f"Binary vectors have 8 dimensions in a byte, and {size} is not a multiple of 8: ask for float or base64.",
            field="embedding_types",
        )


def _rows(kind: str, vectors: FloatArray) -> Iterator[bytes]:
    write = _WRITERS[kind]
    return (write(vector) for vector in vectors)


def _to_signed_bits(vector: FloatArray) -> bytes:
    """Return the packed signs as numbers in [-128, 128): those of `ubinary` less 128, as Cohere defines them."""
    return to_json((numpy.packbits(vector >= 0).astype(numpy.int16) - 128).tolist())


_WRITERS: Mapping[str, Callable[[FloatArray], bytes]] = {
    "float": to_json_list,
    "base64": to_base64_json,
    "binary": _to_signed_bits,
    "ubinary": lambda vector: to_json(numpy.packbits(vector >= 0).tolist()),  # the first dimension is the highest bit
}
