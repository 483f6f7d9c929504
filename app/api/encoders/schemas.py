"""Bodies of the encoder routes: embeddings, classify, and what several dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from app.api.llama_cpp.schemas import LlamaCppInputs
from app.api.schemas import LEAVE_OUT, Body, CacheSalt, Int64, Refusal, Texts, refused
from app.metrics.instruments import Api
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
