"""Responses of the routes about the server."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


class LivenessStatus(TypedDict):
    """Response of `/healthz`: `alive` or `dead`, and what is done until the server is ready."""

    status: str
    stage: NotRequired[str]


class LoadProgressStatus(TypedDict):
    """A phase of loading: its name, linear layers done and in total, percent of the bytes, estimated seconds left."""

    phase: str
    layers_done: int
    layers_total: int
    percent: int
    remaining_seconds: float | None


class ModelStatus(TypedDict):
    """State of one of several models: `unloaded`, `loading`, `ready`, `failed` or `unloading`.

    `stage` is how far it is loaded, or why that has failed.
    """

    state: str
    stage: NotRequired[str]


class ReadinessStatus(TypedDict):
    """Response of `/readyz`: `ready`, `loading` or `stopping`; until it is ready, also the stage of loading.

    `progress` is there while the model is fetched, and while weights are loaded or packed; `models` if there are
    several.
    """

    status: str
    stage: NotRequired[str]
    progress: NotRequired[LoadProgressStatus]
    models: NotRequired[dict[str, ModelStatus]]


class InfoResponse(TypedDict):
    """Response of `/info`. While the server is loading, less is known; without a key, `stage` and `model` alone.

    `models` are the names of several models, with their kinds and states; the rest is of the one that the query names
    as `model`, or the first.

    `model_id` and `max_input_length` are of text-embeddings-inference, as `model_type` and more are for an encoder.
    """

    stage: str
    model: NotRequired[dict[str, Any]]
    model_id: NotRequired[str]
    max_input_length: NotRequired[int]
    version: NotRequired[str]
    capacity: NotRequired[dict[str, Any]]
    models: NotRequired[list[dict[str, Any]]]


class StepLogColumns(TypedDict):
    """Steps as columns: start in Unix seconds, duration, phase, tokens, and the cause if the step was slow."""

    at: list[float]
    seconds: list[float]
    phase: list[str]
    tokens: list[int]
    cause: list[str]


class StepsResponse(TypedDict):
    """Response of `/info/steps`. `next` is the number to request next; `dropped` steps were overwritten."""

    clock: float
    next: int
    dropped: int
    steps: StepLogColumns


class RankLoad(TypedDict):
    """Load of the engine, with SGLang's names. `gen_throughput` is what the server can do in tokens per second."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    utilization: float
    max_running_requests: int
    model: NotRequired[str]


class LoadsResponse(TypedDict):
    """Response of `/v1/loads`; `loads` has one element for each model."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[RankLoad]
