"""Bodies and results of tasks in the form of Hugging Face's inference API: `inputs` and `parameters`.

Parameters have the names of transformers' pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.encoders.schemas import NonEmptyText
from app.api.schemas import LEAVE_OUT, Body, Int64, Refusal, refused
from app.metrics.instruments import Api
from app.service.encode import MAX_TEXTS

MAX_LABELS = 1_000
_MAX_TOP_K = 1_000
TopK = Annotated[Int64, Field(ge=1, le=_MAX_TOP_K)]
Number = Annotated[Int64, Field(ge=1, le=2**20)]
_BATCH = Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)
TextInputs = NonEmptyText | Annotated[tuple[NonEmptyText, ...], _BATCH]
Labels = NonEmptyText | Annotated[tuple[NonEmptyText, ...], Field(fail_fast=True, min_length=1, max_length=MAX_LABELS)]
# Exactly one place for the label: other fields of Python's format strings reach into objects, or fill memory.
Template = Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$", max_length=1_000)]
Function = Literal["sigmoid", "softmax", "none"]
_OPTIONS = refused(LEAVE_OUT, stream=False)


class TaskBody(Body):
    """Body of `POST /pipeline/{task}`. `model` chooses one of several models. `options` of the API have no effect."""

    API: ClassVar[Api] = "tasks"
    REFUSED: ClassVar[Mapping[str, Refusal]] = _OPTIONS
    FOREIGN: ClassVar[Mapping[str, str]] = {"input": "send inputs here.", "messages": "send inputs here."}

    model: str | None = None
    inputs: Any
    parameters: Any = None


class TokenClassificationParameters(Body):
    """Parameters of token classification. With `stride`, a longer text is read in windows that overlap by so much."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = refused("send texts", is_split_into_words=False, delimiter=())

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None
    ignore_labels: tuple[str, ...] | None = None
    stride: Annotated[Int64, Field(ge=0)] | None = None


class TokenClassificationBody(TaskBody):
    """Text or texts, with entities or labels of their tokens as the result."""

    inputs: TextInputs
    parameters: TokenClassificationParameters | None = None


class FillMaskParameters(Body):
    """Parameters of a masked model: `targets` are the only texts that may fill the mask."""

    targets: Labels | None = None
    top_k: TopK | None = None


class FillMaskBody(TaskBody):
    """Text or texts with one or more masks."""

    inputs: TextInputs
    parameters: FillMaskParameters | None = None


class ClassifiedPair(Body):
    """Two texts that are read as one."""

    text: NonEmptyText
    text_pair: NonEmptyText


class TextClassificationParameters(Body):
    """Parameters of the classification of texts. `truncation`: a text that is too long is cut."""

    function_to_apply: Function | None = None
    top_k: TopK | None = None
    truncation: bool | None = None


class TextClassificationBody(TaskBody):
    """Texts or pairs that get labels."""

    inputs: TextInputs | ClassifiedPair | Annotated[tuple[ClassifiedPair, ...], _BATCH]
    parameters: TextClassificationParameters | None = None


class ZeroShotParameters(Body):
    """The labels among which the model chooses, and the sentence about each."""

    candidate_labels: Labels
    hypothesis_template: Template | None = None
    multi_label: bool | None = None


class ZeroShotBody(TaskBody):
    """Texts that get labels which the request names."""

    inputs: TextInputs
    parameters: ZeroShotParameters


class QuestionInput(Body):
    """A question and the text that answers it."""

    question: NonEmptyText
    context: NonEmptyText


class QuestionParameters(Body):
    """Parameters of the answers. A longer context is read in windows of `max_seq_len` tokens."""

    top_k: TopK | None = None
    doc_stride: Annotated[Int64, Field(ge=0)] | None = None
    max_answer_len: Number | None = None
    max_seq_len: Number | None = None
    max_question_len: Number | None = None
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None


class QuestionBody(TaskBody):
    """Questions about a context each."""

    inputs: QuestionInput | Annotated[tuple[QuestionInput, ...], _BATCH]
    parameters: QuestionParameters | None = None


class FeatureParameters(Body):
    """Parameters of hidden states."""

    truncate: bool | None = None


class FeatureBody(TaskBody):
    """Texts whose hidden states are the result."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **_OPTIONS,
        **refused("the states of all tokens are returned, which are not pooled", normalize=False, dimensions=()),
        **refused(LEAVE_OUT, prompt_name=(), truncation_direction=("right", "Right"), encoding_format="float"),
    }

    inputs: TextInputs
    truncate: bool | None = None
    parameters: FeatureParameters | None = None


class ImageParameters(Body):
    """Parameters of the classification of pictures."""

    function_to_apply: Function | None = None
    top_k: TopK | None = None


class ImageBody(TaskBody):
    """A picture in base64 or as a data URL. Without parameters, the body may be the picture's file."""

    inputs: NonEmptyText
    parameters: ImageParameters | None = None


class ZeroShotImageParameters(Body):
    """The labels among which the model chooses, and the sentence about each."""

    candidate_labels: Labels
    hypothesis_template: Template | None = None


class ZeroShotImageBody(TaskBody):
    """A picture that gets labels which the request names."""

    inputs: NonEmptyText
    parameters: ZeroShotImageParameters


class SpeechParameters(Body):
    """Parameters of speech recognition. `language`, `task` and `prompt` are Whisper's."""

    return_timestamps: bool | Literal["word", "char"] | None = None
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    task: Literal["transcribe", "translate"] | None = None
    prompt: Annotated[str, Field(max_length=10_000)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_new_tokens: Annotated[Int64, Field(ge=1, le=2**16)] | None = None


class SpeechBody(TaskBody):
    """A sound in base64 or as a data URL. Without parameters, the body may be the sound's file."""

    inputs: NonEmptyText
    parameters: SpeechParameters | None = None


BODIES: Mapping[str, type[TaskBody]] = {
    "token-classification": TokenClassificationBody,
    "fill-mask": FillMaskBody,
    "text-classification": TextClassificationBody,
    "zero-shot-classification": ZeroShotBody,
    "question-answering": QuestionBody,
    "feature-extraction": FeatureBody,
    "image-classification": ImageBody,
    "automatic-speech-recognition": SpeechBody,
    "zero-shot-image-classification": ZeroShotImageBody,
}


# ---- results ---------------------------------------------------------------------------------------------------------


class TaskAnswer(TypedDict, total=False):
    """An entity, a filled mask, a label or an answer; the fields are those of transformers' pipelines."""

    score: float
    label: str
    entity: str
    entity_group: str
    word: str
    start: int
    end: int
    index: int
    answer: str
    sequence: str
    token: int
    token_str: str
    text: NotRequired[str]
