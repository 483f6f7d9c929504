"""What the service and the worker thread say to each other: frozen dataclasses of plain values, nothing else.

A `Generate`, an `Encode`, an `Infer` or an `Abort` goes in through the mailbox; events come back, one list a step: of a generation
`TokensReady` and `SequenceFinished`, of the others one `ArraysReady`, of any `RequestFailed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.errors import InvalidRequest, RequestError

FinishReason = Literal["stop", "length", "aborted", "timeout"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_BEAMS = 8


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completion tokens are picked. Neutral defaults: plain sampling at temperature 1.

    `max_tokens` None means up to the context's end. `top_k` 0, `top_p` 1, `min_p` 0 are off; temperature 0 is greedy.
    `logprobs` None means none, k means the chosen token's and the k likeliest. Random numbers depend on `seed` and position alone.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    beam_width: int = 1

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} must lie in {_interval(low, high)}, not {value}.", field=name)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be greater than 0.", field="repetition_penalty")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}.", field="stop")
        if any(not text or len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidRequest(f"each stop string has 1 to {MAX_STOP_CHARACTERS} characters.", field="stop")
        if self.beam_width > 1 and self.n > 1:
            raise InvalidRequest("beam_width and n cannot both be greater than 1.", field="beam_width")

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True where what was said before changes what is likely now."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


# name, lowest, highest: the documented ranges of OpenAI's API where it has the parameter.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, math.inf),
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, math.inf),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("seed", -(2**63), 2**63 - 1),
    ("n", 1, MAX_CHOICES),
    ("logprobs", 0, MAX_LOGPROBS),
    ("beam_width", 1, MAX_BEAMS),
)


def _interval(low: float, high: float) -> str:
    return f"[{low:g}, {high:g}]" if math.isfinite(high) else f"[{low:g}, ∞)"


# ---- to the worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """One generation request, tokenised. `arrived_at` is `time.monotonic()` when the HTTP request was admitted."""

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor as plain values. `datatype`: the Open Inference Protocol's word (FP32, INT64, …); `data`: little-endian, row by row."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a program takes or gives: of `shape` the first is the batch, -1; another -1 is free, alike in a whole batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What an exported program takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One text, tokenised, its special tokens included. `type_ids` are as many where it has a second segment, else empty: all 0.

    The first `num_prompt_tokens` are an instruction that is read and not pooled.
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Encode:
    """Texts of one request for an encoder. `outputs` are some of those that the model has: `embedding`, `logits`, `last_hidden_state`.

    `normalize` None: as the checkpoint says. `dimensions`: so many of an embedding's, before it is normalised; None: all.
    """

    request_id: str
    texts: tuple[Text, ...]
    outputs: tuple[str, ...]
    arrived_at: float
    normalize: bool | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Infer:
    """Named tensors for an exported program, as many in the batch dimension of each; `outputs` are the names wanted back."""

    request_id: str
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more. Unknown or finished ids are ignored."""

    request_id: str
    reason: Literal["aborted", "timeout", "stop"] = "aborted"  # "stop": the service found a stop string
    choice: int | None = None  # None: all choices of the request


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker thread once what is running has been told."""


Order = Generate | Encode | Infer
Command = Order | Abort | Stop

# ---- from the worker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural-log probability under the untempered distribution, with the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went, seconds; `cached_tokens` of the prompt were found in the KV cache."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cached_tokens: int = 0
    encode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensReady:
    """New completion tokens of one choice. `logprobs` is as long as `token_ids` where asked for, else empty.

    `timings` comes with a choice's first tokens: its queue and prefill seconds and cached tokens are final then.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One choice has ended; after the last choice of a request the worker has forgotten it.

    `token_ids` are final tokens not yet sent (a beam's whole completion, else empty). `stop_token_id` ended the sequence and is not text.
    """

    request_id: str
    choice: int
    reason: FinishReason
    timings: Timings = field(default_factory=Timings)
    num_completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ArraysReady:
    """All that an `Encode` or an `Infer` asked for, by output: the request has ended.

    `embedding` FP32 [texts, size] and `logits` FP32 [texts, labels] in the order of the texts, `last_hidden_state` FP32 [tokens of all
    texts in a row, size]; an `Infer`'s outputs as its program gives them, cut to its own rows. `num_tokens` were computed.
    """

    request_id: str
    arrays: Mapping[str, Array]
    timings: Timings = field(default_factory=Timings)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """All of this request has ended with this error."""

    request_id: str
    error: RequestError


Event = TokensReady | SequenceFinished | ArraysReady | RequestFailed
