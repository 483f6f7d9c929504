"""Bodies of the encoder routes: embeddings, rerank and classify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.openai.bodies import IGNORED
from app.api.schemas import Body, Int64, Texts

NonEmptyText = Annotated[str, Field(min_length=1)]
NON_EMPTY = Field(fail_fast=True, min_length=1)


class EmbeddingsBody(Body):
    """Body of `POST /v1/embeddings`. `truncate` is an extension: long texts are truncated instead of refused.

    `truncate_prompt_tokens` is vLLM's name for it; -1 is the length that the model reads, the only one supported.
    """

    IGNORED: ClassVar[frozenset[str]] = IGNORED

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Literal[-1] | None = None


class Document(Body):
    """A document given as an object."""

    text: str


class RerankBody(Body):
    """Body of `POST /v1/rerank`, as Cohere's and Jina's clients send it.

    `truncate` and `raw_scores` are extensions.
    """

    IGNORED: ClassVar[frozenset[str]] = IGNORED
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rank_fields": (None, [], ["text"]),
        "max_chunks_per_doc": (None,),
        "max_tokens_per_doc": (None,),
        "priority": (None, 0),
    }

    query: NonEmptyText
    documents: Annotated[tuple[str | Document, ...], NON_EMPTY]
    model: str | None = None
    top_n: Annotated[Int64, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The documents' texts, in order."""
        return tuple(given if isinstance(given, str) else given.text for given in self.documents)


class TextPair(Body):
    """Two texts that are classified together."""

    text: str
    text_pair: str


ClassifyInput = str | TextPair


class ClassifyBody(Body):
    """Body of `POST /v1/classify`."""

    IGNORED: ClassVar[frozenset[str]] = IGNORED

    input: ClassifyInput | Annotated[tuple[ClassifyInput, ...], NON_EMPTY]
    model: str | None = None
    truncate: bool | None = None
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
    def truncate_left(self) -> bool:
        """True if truncation removes the start of the text."""
        return self.truncation_direction in ("Left", "left")


class TextsBody(TruncationFields):
    """Texts, and the name of the checkpoint's prompt that is put before them."""

    inputs: Texts
    prompt_name: str | None = None


class EmbedBody(TextsBody):
    """Body of `POST /embed`. `normalize` None means as the checkpoint says."""

    normalize: bool | None = None
    dimensions: Int64 | None = None


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
    """Response of `POST /embed`."""

    embeddings: list[list[float]]
    usage: PromptUsage


class DocumentText(TypedDict):
    """The text of a ranked document."""

    text: str


class RerankResult(TypedDict):
    """A document's place in the request and its relevance; its text with `return_documents`."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class RerankResponse(TypedDict):
    """Response of `POST /v1/rerank`, best document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncoderUsage


class LabelScore(TypedDict):
    """A label with its score."""

    label: str
    score: float


class ClassificationObject(TypedDict):
    """The labels of one text, best first; `prediction` and `score` are those of the best."""

    object: Literal["classification"]
    index: int
    prediction: str
    score: float
    predictions: list[LabelScore]


class ClassifyResponse(TypedDict):
    """Response of `POST /v1/classify`."""

    object: Literal["list"]
    data: list[ClassificationObject]
    model: str
    usage: EncoderUsage
