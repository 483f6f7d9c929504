"""Bodies, responses and errors of the encoders' routes: OpenAI's, the native, vLLM's, Cohere's and the TEI dialect.

TEI is text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.llama_cpp.schemas import LlamaCppInputs
from app.api.schemas import LEAVE_OUT, Body, CacheSalt, Int64, Refusal, Texts, refused, validate_token_ids
from app.errors import InvalidRequest
from app.metrics.instruments import Api
from app.service.encode import MAX_TEXTS
from app.service.requests import Truncation

NonEmptyText = Annotated[str, Field(min_length=1)]
NON_EMPTY = Field(fail_fast=True, min_length=1)
TokenLimit = Annotated[Int64, Field(ge=0)]  # 0: no limit


class PoolingFields(Body):
    """Fields common to OpenAI's and vLLM's routes for encoders. `truncate` is an extension: long texts are truncated.

    Requests share nothing, so any `cache_salt` is followed. With vLLM's `truncate_prompt_tokens` they are truncated to
    this number of tokens; -1: to as many as the model reads. With `use_activation` false, scores are logits and vectors
    are not normalized.
    """

    API: ClassVar[Api] = "embeddings"
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **refused(LEAVE_OUT, add_special_tokens=True, image=(), images=([],)),
        **refused("use use_activation", normalize=True, activation=True, softmax=True),
    }

    model: str | None = None
    cache_salt: CacheSalt | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    @property
    def truncation(self) -> Truncation:
        """Handling of texts that are too long."""
        return truncation_to(self.truncate_prompt_tokens, bool(self.truncate), self.truncation_side == "left")


def truncation_to(tokens: int | None, truncates: bool, left: bool) -> Truncation:
    """Return the truncation to vLLM's number of tokens, or without one to what the model reads, if it `truncates`."""
    return Truncation(truncates, left) if tokens is None else Truncation(True, left, tokens)


class EmbeddingsBody(PoolingFields):
    """Body of `POST /v1/embeddings`. `input` has OpenAI's forms and llama.cpp's."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **PoolingFields.REFUSED,
        **refused(
            "put the checkpoint's prompt before each text, or use /embed with prompt_name",
            input_type=(),
            task=(),
            task_type=(),
            prompt_name=(),
        ),
        **refused("use encoding_format", embedding_type="float", embedding_types=(["float"],), output_dtype="float"),
        **refused("use dimensions", output_dimension=()),
        **refused(LEAVE_OUT, late_chunking=False, stream=False, embd_normalize=2),
    }
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send input here, or send inputs to /embed (text-embeddings-inference) or /encode.",
        "texts": "send input here, or send texts to /v1/embed or /v2/embed (Cohere).",
        "prompt": "send input here, or send prompt to /api/embeddings (Ollama).",
        "messages": "send input here; an encoder reads texts and no conversations.",
    }

    input: LlamaCppInputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None


class TextPair(Body):
    """Two texts that are classified together."""

    text: str
    text_pair: str


ClassifyInput = str | TextPair


class ClassifyBody(PoolingFields):
    """Body of `POST /v1/classify` and `/classify`. `raw_scores` is an extension: scores are logits."""

    API: ClassVar[Api] = "classify"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send input here, or send inputs to /predict (text-embeddings-inference).",
        "texts": "send input here.",
        "text_1": "send pairs as input, each {text, text_pair}; or send text_1 and text_2 to /score.",
    }

    input: ClassifyInput | Annotated[tuple[ClassifyInput, ...], NON_EMPTY]
    raw_scores: bool | None = None

    @property
    def texts(self) -> tuple[str | tuple[str, str], ...]:
        """The texts and pairs, in order; one input becomes a tuple of one."""
        given = self.input if isinstance(self.input, tuple) else (self.input,)
        return tuple(one if isinstance(one, str) else (one.text, one.text_pair) for one in given)


class TruncationFields(Body):
    """Handling of a text that is too long, with the fields of text-embeddings-inference."""

    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    @property
    def truncation(self) -> Truncation:
        """Handling of texts that are too long."""
        return Truncation(bool(self.truncate), left=self.truncation_direction in ("Left", "left"))


class TextsBody(TruncationFields):
    """Texts, and the name of the checkpoint's prompt that is put before them."""

    API: ClassVar[Api] = "embeddings"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "input": "send inputs here, or send input to /v1/embeddings (OpenAI).",
        "texts": "send inputs here, or send texts to /v1/embed or /v2/embed (Cohere).",
    }

    inputs: Texts
    prompt_name: str | None = None


class EmbedBody(TextsBody):
    """Body of `POST /encode` and `/embed`. `normalize` None means as the checkpoint says on `/encode`, true on `/embed`."""

    normalize: bool | None = None
    dimensions: Int64 | None = None


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


# ---- vLLM ----------------------------------------------------------------------------------------------------------

Queries = NonEmptyText | Annotated[tuple[NonEmptyText, ...], NON_EMPTY]
Documents = str | Annotated[tuple[str, ...], NON_EMPTY]  # one without text has a score too
# The pairs of names that vLLM's versions have had for the two sides.
_SIDES = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))


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


# ---- reranking -----------------------------------------------------------------------------------------------------


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


# ---- Cohere --------------------------------------------------------------------------------------------------------

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


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


# ---- text-embeddings-inference -------------------------------------------------------------------------------------

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


# ---- responses -----------------------------------------------------------------------------------------------------


class PromptUsage(TypedDict):
    """Tokens of the texts."""

    prompt_tokens: int


class EncoderUsage(PromptUsage):
    """Tokens of the texts, in OpenAI's two fields."""

    total_tokens: int


class EmbeddingObject(TypedDict):
    """The vector of one input: numbers, or the base64 of little-endian FP32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(TypedDict):
    """Response of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EncoderUsage


class EmbedResponse(TypedDict):
    """Response of `POST /encode`."""

    embeddings: list[list[float]]
    usage: PromptUsage


class LabelScore(TypedDict):
    """A label with its score."""

    label: str
    score: float


class ClassificationObject(TypedDict):
    """The labels of one text, best first; `prediction` and `score` are those of the best.

    vLLM's names are `label` for the best label, and `probs` for the scores in the checkpoint's order of labels.
    """

    object: Literal["classification"]
    index: int
    label: str
    probs: list[float]
    num_classes: int
    prediction: str
    score: float
    predictions: list[LabelScore]


class ListResponse(TypedDict):
    """Fields common to vLLM's responses."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: EncoderUsage


class ClassifyResponse(ListResponse):
    """Response of `POST /v1/classify` and `/classify`."""

    data: list[ClassificationObject]


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


# ---- errors --------------------------------------------------------------------------------------------------------


class CohereError(TypedDict):
    """Error body of Cohere's API."""

    message: str


class TeiError(TypedDict):
    """Error body of text-embeddings-inference."""

    error: str
    error_type: str


def _cohere_error(error: HttpError) -> dict[str, Any]:
    return {"message": error.message}


def _tei_error(error: HttpError) -> dict[str, Any]:
    kind = _TEI_ERRORS.get(error.status, "Backend" if error.status >= 500 else "Validation")
    return {"error": error.message, "error_type": kind}


_TEI_ERRORS: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}
COHERE_ERRORS = ErrorFormat(_cohere_error, CohereError)
TEI_ERRORS = ErrorFormat(_tei_error, TeiError)
