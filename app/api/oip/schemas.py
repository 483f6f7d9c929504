"""Bodies of the Open Inference Protocol: `infer` with its tensors, and the generate extension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.errors import ErrorFormat, HttpError
from app.api.schemas import LEAVE_OUT, OPENAI_ONLY, OTHER_SAMPLERS, Body, Int64, Refusal, SamplingFields, refused
from app.metrics.instruments import Api

MAX_TENSORS = 64  # inputs or outputs of one request
MAX_DIMENSIONS = 16

Dimension = Annotated[int, Field(ge=0, le=2**64 - 1)]
# Values that MLServer's clients send for tensors that need no conversion.
CONTENT_TYPE: Mapping[str, Refusal] = refused(LEAVE_OUT, content_type=("str", "np"))


class InputParameters(Body):
    """Parameters of an input. `binary_data_size` is the number of its bytes after the JSON."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **CONTENT_TYPE,
        **refused(LEAVE_OUT, shared_memory_region=(), shared_memory_byte_size=(), shared_memory_offset=()),
    }

    binary_data_size: Int64 | None = None


class InputTensor(Body):
    """An input tensor in row-major order: `data` is flat or nested according to `shape`, or absent for binary data."""

    name: str
    shape: Annotated[tuple[Dimension, ...], Field(fail_fast=True, max_length=MAX_DIMENSIONS)]
    datatype: str
    parameters: InputParameters | None = None
    data: Any = None

    @property
    def binary_size(self) -> int | None:
        """Size in bytes of the binary data; None if the tensor is given as JSON."""
        return self.parameters.binary_data_size if self.parameters else None


class OutputParameters(Body):
    """Parameters of an output. `binary_data` requests it as bytes after the response's JSON.

    `classification` requests the most probable classes of each row in place of a program's values.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = InputParameters.REFUSED

    binary_data: bool | None = None
    classification: Annotated[int, Field(ge=0, le=10_000)] | None = None


class OutputTensor(Body):
    """A requested output."""

    name: str
    parameters: OutputParameters | None = None


class InferParameters(Body):
    """Parameters of `infer`.

    `binary_data_output` and `timeout` (microseconds) are the protocol's. The others are for encoders and are the
    same as in `/encode`.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **CONTENT_TYPE,
        **refused(LEAVE_OUT, sequence_id=(0, ""), sequence_start=False, sequence_end=False),
    }

    binary_data_output: bool | None = None
    timeout: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    dimensions: Int64 | None = None
    prompt_name: str | None = None


class InferBody(Body):
    """Body of `POST /v2/models/{model}/infer`. The path names the model."""

    API: ClassVar[Api] = "oip"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "instances": "send inputs here, or send instances to /v1/models/{model}:predict.",
        "text_input": "send inputs here, or send text_input to generate.",
    }

    inputs: Annotated[tuple[InputTensor, ...], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    id: str | None = None
    parameters: InferParameters | None = None
    outputs: Annotated[tuple[OutputTensor, ...], Field(fail_fast=True, max_length=MAX_TENSORS)] | None = None


class InstancesBody(Body):
    """Body of `POST /v1/models/{model}:predict`. An instance is a value of a program's only input, or one by each name.

    A picture is `{"b64": ...}`.
    """

    API: ClassVar[Api] = "oip"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send instances here, or send inputs to /v2/models/{model}/infer."
    }
    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(LEAVE_OUT, signature_name=("", "serving_default"))

    instances: Annotated[tuple[Any, ...], Field(min_length=1)]


class InstancesResponse(TypedDict):
    """Response of version 1: for each instance its row of a program's only output, or a row by each name."""

    predictions: list[Any]


class GenerateParameters(SamplingFields):
    """Parameters of the generate extension. Without `max_tokens` the text has 20 tokens, as the protocol says.

    `details` adds the finish reason and each token with its log-probability. The response never repeats the
    prompt.
    """

    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        **OPENAI_ONLY,
        **refused(LEAVE_OUT, exclude_input_in_output=True, return_context_logits=False, image_input=()),
        **refused("use stop", stop_words=("", [])),
        **refused("use seed", random_seed=()),
    }

    max_tokens: Int64 | None = None
    details: bool | None = None
    stream: bool | None = None


class OipGenerateBody(GenerateParameters):
    """Body of `POST /v2/models/{model}/generate` and `/generate_stream`.

    Parameters may be in `parameters` or at the top level.
    """

    API: ClassVar[Api] = "oip"
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "inputs": "send text_input here, or send inputs to infer.",
        "prompt": "send text_input here, or send prompt to /v1/completions.",
    }

    text_input: str
    id: str | None = None
    parameters: GenerateParameters | None = None


class RepositoryIndexBody(Body):
    """Body of `POST /v2/repository/index`, which may be empty. With `ready`, only models that are ready are listed."""

    API: ClassVar[Api] = "oip"

    ready: bool | None = None


class ModelControlBody(Body):
    """Body of `load` and `unload`, which may be empty. What it says about files and configurations is refused."""

    parameters: dict[str, Any] | None = None


# ---- errors and responses ------------------------------------------------------------------------------------------


class OipError(TypedDict):
    """Error body of the protocol."""

    error: str


def _error_body(error: HttpError) -> dict[str, Any]:
    return {"error": error.message}


OIP_ERRORS = ErrorFormat(_error_body, OipError)


class ServerMetadata(TypedDict):
    """Response of `GET /v2`."""

    name: str
    version: str
    extensions: list[str]


class ServerLiveness(TypedDict):
    """Response of `GET /v2/health/live`."""

    live: bool


class ServerReadiness(ServerLiveness):
    """Response of `GET /v2/health/ready`."""

    ready: bool


class ModelReadiness(TypedDict):
    """Response of the readiness of a model."""

    name: str
    ready: bool


class TensorParameters(TypedDict):
    """What a program's description says of a tensor: it takes pictures, or its values have so many labels."""

    picture: NotRequired[bool]
    labels: NotRequired[int]


class TensorMetadata(TypedDict):
    """A tensor of a model; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: list[int]
    parameters: NotRequired[TensorParameters]


class ModelMetadata(TypedDict):
    """Metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfigTensor(TypedDict):
    """A tensor in the model configuration extension."""

    name: str
    data_type: str
    dims: list[int]
    optional: NotRequired[bool]


class ModelConfiguration(TypedDict):
    """Response of the model configuration extension."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]


class BinarySize(TypedDict):
    """Parameter of an output whose bytes follow the JSON."""

    binary_data_size: int


class InferOutput(TypedDict):
    """An output tensor: `data` in row-major order, or the size of its binary data."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[BinarySize]


class InferResponse(TypedDict):
    """Response of `infer`; an encoder's `parameters` have `prompt_tokens`."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    outputs: list[InferOutput]


class OipToken(TypedDict):
    """A generated token with its log-probability."""

    id: int
    text: str
    logprob: float
    special: bool


class GenerateDetails(TypedDict):
    """Finish reason, tokens and usage of a complete text."""

    finish_reason: str
    logprobs: list[OipToken]
    prompt_tokens: int
    completion_tokens: int


class TokenDetails(TypedDict):
    """The token of an event, or the finish reason in the last one."""

    finish_reason: str | None
    token: OipToken | None


class OipGenerated(TypedDict):
    """Fields common to the responses and events of the generate extension."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    text_output: str


class OipGenerateResponse(OipGenerated):
    """Response of `generate`."""

    details: NotRequired[GenerateDetails]


class OipGenerateEvent(OipGenerated):
    """Event of `generate_stream`."""

    details: NotRequired[TokenDetails]


class IndexedModel(TypedDict):
    """A model of the repository. `reason` says why it is not ready."""

    name: str
    version: str
    state: str
    reason: str


class DurationStatistic(TypedDict):
    """Number and total nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(TypedDict):
    """Statistics of requests since the start.

    `success` and `fail` are requests by their time from arrival to end, `queue` their time until the first step.
    `compute_infer` are the engine's steps, each of which may serve many requests. There is no cache of responses, and
    the conversion of inputs and outputs is not measured apart.
    """

    success: DurationStatistic
    fail: DurationStatistic
    queue: DurationStatistic
    compute_input: DurationStatistic
    compute_infer: DurationStatistic
    compute_output: DurationStatistic
    cache_hit: DurationStatistic
    cache_miss: DurationStatistic


class ModelStatistics(TypedDict):
    """Statistics of the model. `last_inference` is the end of the last successful request in Unix milliseconds, or 0.

    `inference_count` are successful requests, `execution_count` the engine's steps.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]
    response_stats: dict[str, Any]


class StatisticsResponse(TypedDict):
    """Response of the statistics extension."""

    model_stats: list[ModelStatistics]
