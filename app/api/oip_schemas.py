"""What bodies of the Open Inference Protocol look like: `infer` with its tensors, and the generate extension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from app.api.schemas import Body, Int, SamplingFields

MAX_TENSORS = 64  # inputs or outputs of one request
MAX_DIMENSIONS = 16

Dimension = Annotated[int, Field(ge=0, le=2**64 - 1)]
# What MLServer's clients say of a tensor that holds what it seems to hold.
CONTENT_TYPE = (None, "str", "np")


class InputParameters(Body):
    """`binary_data_size`: so many of the bytes behind the JSON are this tensor."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"content_type": CONTENT_TYPE}

    binary_data_size: Int | None = None


class InputTensor(Body):
    """One tensor, row by row: `data` flat or nested as `shape` says, or binary."""

    name: str
    shape: Annotated[tuple[Dimension, ...], Field(fail_fast=True, max_length=MAX_DIMENSIONS)]
    datatype: str
    parameters: InputParameters | None = None
    data: Any = None

    @property
    def binary_size(self) -> int | None:
        return self.parameters.binary_data_size if self.parameters else None


class OutputParameters(Body):
    """`binary_data`: as bytes behind the answer's JSON."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"content_type": CONTENT_TYPE, "classification": (None, 0)}

    binary_data: bool | None = None


class OutputTensor(Body):
    name: str
    parameters: OutputParameters | None = None


class InferParameters(Body):
    """Of the protocol: `binary_data_output`, and `timeout` in microseconds. Of an encoder: the others, as in `/embed`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_type": CONTENT_TYPE,
        "priority": (None, 0),
        "sequence_id": (None, 0, ""),
        "sequence_start": (None, False),
        "sequence_end": (None, False),
    }

    binary_data_output: bool | None = None
    timeout: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    dimensions: Int | None = None
    prompt_name: str | None = None


class InferBody(Body):
    """`POST /v2/models/{model}/infer`. The path says which model."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model_name", "model_version"})

    inputs: Annotated[tuple[InputTensor, ...], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    id: str | None = None
    parameters: InferParameters | None = None
    outputs: Annotated[tuple[OutputTensor, ...], Field(fail_fast=True, max_length=MAX_TENSORS)] | None = None


class GenerateParameters(SamplingFields):
    """How the generate extension's text comes about. Without `max_tokens` it has 20 tokens, as the protocol says.

    `details`: also why it ended, and each token with its log-probability. An answer never repeats its prompt.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "exclude_input_in_output": (None, True),
        "bad_words": (None, ""),
        "stop_words": (None, ""),
    }

    max_tokens: Int | None = None
    details: bool | None = None
    stream: bool | None = None


class OipGenerateBody(GenerateParameters):
    """`POST /v2/models/{model}/generate` and `/generate_stream`. Parameters stand in `parameters` or beside `text_input`."""

    text_input: str
    id: str | None = None
    parameters: GenerateParameters | None = None
