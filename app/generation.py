"""Types between the service and the API dialects for generation: the request, and the events of its stream.

All are plain frozen values. Each dialect translates its bodies to `GenerationRequest`, and stream events to its
own response format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.messages import FinishReason, SamplingParams, Timings
from app.metrics import Api


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request with exactly one of `prompt`, `token_ids` and `messages`.

    `messages` are rendered with the checkpoint's chat template. `request_id` is what the client sees
    (`x-request-id`); it need not be unique, because the service appends a number. `add_special_tokens` applies
    to `prompt` only: token ids are used unchanged, and a template writes its own special tokens. `echo` puts the
    prompt's text before each completion.
    """

    params: SamplingParams
    api: Api
    request_id: str
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    echo: bool = False

    def __post_init__(self) -> None:
        given = sum(source is not None for source in (self.prompt, self.token_ids, self.messages))
        assert given == 1, "exactly one of prompt, token_ids and messages must be given"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens` is the part of the prompt found in the KV cache."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its text, bytes, log-probability and the most likely alternatives, best first.

    The text has U+FFFD where the bytes are not a whole character.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every stream: the request is valid and admitted.

    A refusal is raised before it, so a dialect awaits this event before it sends the status line.
    """

    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of one choice, with the tokens it came from.

    Joining the deltas of a choice gives its text, and joining `token_ids` its tokens. `text` is empty only if
    tokens without text end a choice. `logprobs` is as long as `token_ids` if requested, else empty. `timings`
    comes with a choice's first tokens, so that a streaming response can report queue and prefill time before the
    rest is known.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The end of one choice, once, after its last delta.

    `usage` covers the whole request so far; the last event has all of it. `num_completion_tokens` counts this
    choice only. `matched_stop` is the stop string or the stop token id that ended the choice.
    """

    choice: int
    reason: FinishReason
    usage: Usage
    num_completion_tokens: int
    timings: Timings
    matched_stop: str | int | None = None


Piece = Accepted | TextDelta | ChoiceFinished
