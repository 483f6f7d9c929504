"""What the spans of a sampled request say, without OpenTelemetry.

Names are OpenTelemetry's semantic conventions for generative AI, and vLLM's `gen_ai.latency.*`. Prompts, completions,
stop strings and headers are never among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.messages import SamplingParams
from app.metrics.instruments import Api, Exemplar

Value = str | bool | int | float

# Attribute of each sampling parameter, and the value that says nothing: it is left out.
_SAMPLING: tuple[tuple[str, str, Value | None], ...] = (
    ("max_tokens", "gen_ai.request.max_tokens", None),
    ("temperature", "gen_ai.request.temperature", None),
    ("top_p", "gen_ai.request.top_p", None),
    ("top_k", "gen_ai.request.top_k", 0),
    ("presence_penalty", "gen_ai.request.presence_penalty", 0.0),
    ("frequency_penalty", "gen_ai.request.frequency_penalty", 0.0),
    ("seed", "gen_ai.request.seed", None),
    ("n", "gen_ai.request.choice.count", 1),
)


@dataclass(slots=True)
class RequestTrace:
    """What is known of a sampled HTTP request, which may be several requests of the service.

    `exemplar` has the ids of its span. `error` is the code of what failed first. Times are of `time.monotonic`: of
    several parts, the queue ends with the first that leaves it, and the other phases with the last.
    """

    exemplar: Exemplar
    api: Api | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    arrived_at: float | None = None
    phase_ends: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float | None = None
    error: str | None = None

    def note_model(self, name: str) -> None:
        self.attributes["gen_ai.request.model"] = self.attributes["gen_ai.response.model"] = name

    def note_sampling(self, params: SamplingParams) -> None:
        for name, attribute, silent in _SAMPLING:
            value = getattr(params, name)
            if value is not None and value != silent:
                self.attributes[attribute] = value

    def add_tokens(self, prompt: int, cached: int, completion: int) -> None:
        for name, number in (
            ("gen_ai.usage.input_tokens", prompt),
            ("gen_ai.usage.cache_read.input_tokens", cached),
            ("gen_ai.usage.output_tokens", completion),
        ):
            self.attributes[name] = int(self.attributes.get(name, 0)) + number

    def add_times(
        self, arrived_at: float, phase_ends: Mapping[str, float], first_token_seconds: float | None = None
    ) -> None:
        """Add the times of one part; `first_token_seconds` count from its arrival, and the longest counts."""
        self.arrived_at = arrived_at if self.arrived_at is None else min(self.arrived_at, arrived_at)
        for name, end in phase_ends.items():
            latest = min if name == "queue" else max
            self.phase_ends[name] = latest(self.phase_ends.get(name, end), end)
        if first_token_seconds is not None:
            self.first_token_seconds = max(self.first_token_seconds or 0.0, first_token_seconds)


class RequestSpan(Protocol):
    """The server span of one request. `traceresponse` is the value of that header."""

    traceresponse: str

    @property
    def trace(self) -> RequestTrace | None:
        """What the span will say; None if the request is not sampled."""

    def end(self, request_id: str, status: int, error: str | None, is_stream: bool) -> None:
        """End the span. `error` is the code of the error that the client got, if it got one."""


class Tracer(Protocol):
    """Where the spans of requests are made and sent."""

    def begin(self, scope: Mapping[str, Any], route: str, operation: str) -> RequestSpan:
        """Begin the span of a request; `route` is its path's template, `operation` empty if the body decides."""

    def close(self, seconds: float) -> None:
        """Send what is left, in at most so many seconds."""
