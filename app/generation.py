"""The words between the service and the faces: what a client asks for, and the pieces it is answered with.

Plain frozen values in our own vocabulary; each dialect translates its bodies to `GenerationRequest` and pieces to its own shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.messages import FinishReason, SamplingParams, Timings
from app.metrics import Api


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Exactly one of `prompt`, `token_ids` and `messages` is given; `messages` go through the checkpoint's chat template.

    `request_id` is what the client sees (`x-request-id`); it need not be unique, the service adds a number of its own.
    `add_special_tokens` is about `prompt` only: ids are taken as they are, and a template writes its own special tokens.
    `echo` puts the prompt's text before each completion.
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
        assert given == 1, "a dialect gives exactly one of prompt, token_ids and messages"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its text (U+FFFD where it is no whole character), bytes and log-probability, and the likeliest instead, best first."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """Always the first piece: the request is valid and admitted. Refusals come before it, so a dialect awaits it before its status line."""

    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of one choice's text, with the tokens it came from. The deltas of a choice joined are its text, `token_ids` joined its tokens.

    `text` is empty only where tokens without text end a choice. `logprobs` is as long as `token_ids` where asked for, else empty.
    `timings` comes with a choice's first tokens: a streaming face tells queue and prefill before the rest is known.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One choice has ended, once, after its last delta. `usage` is the whole request's so far: the last piece carries all of it.

    `num_completion_tokens` are this choice's own. `matched_stop` is the stop string or the stop token's id that ended it.
    """

    choice: int
    reason: FinishReason
    usage: Usage
    num_completion_tokens: int
    timings: Timings
    matched_stop: str | int | None = None


Piece = Accepted | TextDelta | ChoiceFinished
