"""Request bodies of the text-embeddings-inference dialect."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from app.api.encoder_schemas import CutFields, Many, TextsBody, Words
from app.api.schemas import Body

One = str | tuple[str, str]


def _predicted(value: Any) -> tuple[bool, tuple[One, ...]]:
    """Return whether the input is a batch, and the texts.

    A list of strings is one text or a pair; only a list of lists is a batch.
    """
    if isinstance(value, list) and value and isinstance(value[0], list):
        return True, tuple(_one(item) for item in value)
    return False, (value if isinstance(value, str) else _one(value),)


def _one(value: Any) -> One:
    if isinstance(value, list) and len(value) in (1, 2) and set(map(type, value)) == {str}:
        return value[0] if len(value) == 1 else (value[0], value[1])
    raise ValueError("Input should be a string, a pair of strings, or a list of lists of one or two strings")


Predicted = Annotated[
    Any,
    AfterValidator(_predicted),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}},
            ]
        }
    ),
]


class PredictBody(CutFields):
    """Body of `POST /predict`."""

    inputs: Predicted
    raw_scores: bool | None = None


class RankBody(CutFields):
    """Body of `POST /rerank`."""

    query: Words
    texts: Annotated[tuple[str, ...], Many]
    raw_scores: bool | None = None
    return_text: bool | None = None


class EmbedAllBody(TextsBody):
    """Body of `POST /embed_all`."""


class Sentences(Body):
    """A sentence and the sentences that it is compared with."""

    source_sentence: Words
    sentences: Annotated[tuple[str, ...], Many]


class SimilarityParameters(CutFields):
    """Parameters of `/similarity`."""

    prompt_name: str | None = Field(default=None)


class SimilarityBody(Body):
    """Body of `POST /similarity`."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
