"""Messages between the service and the engine: frozen dataclasses of plain values, which another process could read.

The engine's mailbox takes `Generate`, `Encode`, `Infer`, `RunTask`, `Abort`, `SetAdapter` and `Stop`. Events come back as one list
per step: `PromptScored`, `TokensReady` and `SequenceFinished` for a generation, one `ArraysReady` for an `Encode` or
`Infer`, and `RequestFailed` for any of them. Messages between the API and the service are in `service/requests.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct, structs

from app.errors import InvalidRequest, RequestError

FinishReason = Literal["stop", "length", "aborted", "timeout", "tool_calls"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20  # unless the server's max_logprobs says otherwise
ALL_LOGPROBS = -1  # those of all tokens, as a number of log-probabilities
MAX_CHOICES = 16
MAX_BEAMS = 8
MAX_LOGIT_BIASES = 1024  # OpenAI's limit is 300
MAX_BAD_WORDS = 256
MAX_LOGPROB_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. The defaults are neutral: plain sampling at temperature 1.

    `max_tokens` None means up to the end of the context, and 0, with `prompt_logprobs`, no completion. `top_k` 0, `top_p` 1
    and `min_p` 0 are off; temperature 0 is greedy. `logprobs` None means none; k means those of the sampled token and
    of the k most likely ones, or of all for -1. `prompt_logprobs` is the same for the prompt's tokens after the first. With
    `logprob_token_ids`, those of these tokens take the place of the most likely ones.
    Random numbers depend on `seed` and position only. `logit_bias` has token ids with what is added to their
    logits. No end token is sampled before `min_tokens`. `bad_words` are texts that are not sampled, and
    `allowed_token_ids`, if not None, are the only tokens that are. A sequence with a lower `priority` is computed
    first. `include_stop` keeps the matched stop string in the text. With `beam_width` above 1, the choices are the `n`
    best beams; a beam's score is its log-probability over its length to the power of `length_penalty`, and
    `early_stopping` is that of transformers: when a search ends before all beams have ended. `forced_bos_token_id` is the
    first token of the completion of a model with an encoder, such as the language of a translation.
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
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    forced_bos_token_id: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if name == "max_tokens" and self.prompt_logprobs is not None:
                low = 0
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} must be in {_interval(low, high)}, not {value}.", field=name)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be greater than 0.", field="repetition_penalty")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}.", field="stop")
        if any(not text or len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidRequest(f"each stop string has 1 to {MAX_STOP_CHARACTERS} characters.", field="stop")
        self._check_token_rules()
        self._check_logprob_token_ids()
        if 1 < self.beam_width < self.n:
            raise InvalidRequest(f"n must not be greater than beam_width, which is {self.beam_width}.", field="n")

    def _check_token_rules(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not be greater than max_tokens.", field="min_tokens")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(f"logit_bias takes at most {MAX_LOGIT_BIASES} tokens.", field="logit_bias")
        if any(not -100 <= bias <= 100 for _, bias in self.logit_bias):
            raise InvalidRequest("each logit_bias must be in [-100, 100].", field="logit_bias")
        if len(self.bad_words) > MAX_BAD_WORDS or any(
            not text or len(text) > MAX_STOP_CHARACTERS for text in self.bad_words
        ):
            limits = f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidRequest(f"bad_words takes {limits}.", field="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", field="allowed_token_ids")

    def _check_logprob_token_ids(self) -> None:
        field = "logprob_token_ids"
        if not self.logprob_token_ids:
            return
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(f"{field} takes at most {MAX_LOGPROB_TOKEN_IDS} token ids.", field=field)
        if self.logprobs is None:
            raise InvalidRequest(f"{field} needs logprobs.", field=field)
        if self.beam_width > 1:
            raise InvalidRequest(f"{field} cannot be combined with a beam search.", field=field)
        if self.max_tokens == 0:
            raise InvalidRequest(f"{field} needs max_tokens of at least 1: no token is generated.", field=field)

    @property
    def num_top_logprobs(self) -> int:
        """Number of tokens with log-probabilities next to a sampled one, at most."""
        return len(self.logprob_token_ids) + 1 if self.logprob_token_ids else self.logprobs or 0

    @property
    def num_sequences(self) -> int:
        """Number of sequences of which the request consists at first. The beams of a search begin as one."""
        return self.n if self.beam_width == 1 else 1

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the scores of later ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_scores(self) -> bool:
        """True if logits are changed before a token is sampled, so that all of them are needed."""
        return self.has_penalties or bool(self.logit_bias)


# Name, lowest and highest value. OpenAI's documented range for parameters of its API.
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
    ("logprobs", ALL_LOGPROBS, math.inf),
    ("prompt_logprobs", ALL_LOGPROBS, math.inf),
    ("beam_width", 1, MAX_BEAMS),
    ("length_penalty", -10.0, 10.0),
    ("min_tokens", 0, math.inf),
    ("priority", -(2**31), 2**31 - 1),
)


def _interval(low: float, high: float) -> str:
    return f"[{low:g}, {high:g}]" if math.isfinite(high) else f"[{low:g}, ∞)"


# ---- from the service to the engine --------------------------------------------------------------------------------


GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a client gives it.

    `text` is a JSON schema, a regular expression, a JSON list of strings, a grammar in Lark or GBNF syntax, or a
    grammar in llguidance's Lark syntax. `field` is the client's name for it, used in error messages. If `after` is not
    empty, the grammar begins after the first occurrence of this text, and any text may come before it; if `opening` is
    not empty either, this holds for a text that begins with it only. `answer` is a fixed text in front of what follows
    the grammar. `alternative` is another grammar, in llguidance's Lark syntax, which the text may follow instead.
    `is_open`: objects of a schema that lists their properties may have others.
    """

    kind: GrammarKind
    text: str
    field: str
    after: str = ""
    alternative: str = ""
    opening: str = ""
    answer: str = ""
    is_open: bool = False

    def literal_text(self) -> str:
        """Return a text that has all fixed texts of the grammar, without the escapes of its syntax."""
        texts: list[str] = []
        if self.kind in ("json_schema", "choice"):
            with suppress(ValueError, RecursionError):  # the library says what is wrong with text that is no JSON
                texts.append(json.dumps(json.loads(self.text), ensure_ascii=False))
        grammars = (one for text in (self.text, self.alternative) for one in (text, text.replace("\\", "")))
        return "\n".join((*texts, *grammars, self.after, self.opening, self.answer))


class ThinkingLimit(Struct, frozen=True, array_like=True):
    """At `budget` tokens of reasoning the tokens of `closing` are forced.

    Reasoning begins with one of `starts`, unless the prompt `is_open`, and ends with one of `ends`: a text may be written
    in several ways.
    """

    budget: int
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    is_open: bool = False


class LoadedAdapter(Struct, frozen=True, array_like=True):
    """A LoRA adapter that is loaded in a slot. `number` is unique in this process: the next adapter there has another."""

    slot: int
    number: int


class SetAdapter(Struct, frozen=True, array_like=True, tag=True):
    """Use the weights that were read for a slot, or empty it. No request that uses it may be open."""

    slot: int
    is_loaded: bool


# Ids from here on stand for vectors in a prompt. They follow from the content, so that equal prompts have equal ids, and
# lie beyond every vocabulary.
FIRST_VECTOR_ID, NUM_VECTOR_IDS = 2**30, 2**30


class PromptVectors(Struct, frozen=True, array_like=True):
    """Vectors of a picture, FP32 [rows, size] in row-major `data`, in place of a prompt's tokens from `start` on.

    A row is the input of the first layer, then what is added to the results of the first layers, if anything. `places`
    int64 [3, rows]: positions in three axes, counted from the position of the first row, of which there are `num_places`
    in all; empty: one row is one position. `block`: the tokens around the rows that see each other in both directions.
    """

    start: int
    num_rows: int
    data: bytes
    places: bytes = b""
    num_places: int = 0
    block: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    def moved(self, start: int) -> PromptVectors:
        """Return the vectors in a prompt in which the first token of their picture is at `start`."""
        block = None if self.block is None else (start + self.block[0], start + self.block[1])
        return structs.replace(self, start=start + self.start, block=block)

    def in_block(self, block: tuple[int, int]) -> PromptVectors:
        return structs.replace(self, block=block)

    @property
    def shift(self) -> int:
        """By how much the positions after the rows differ from their numbers."""
        return self.num_places - self.num_rows if self.places else 0


class Generate(Struct, frozen=True, array_like=True, tag=True):
    """One tokenized generation request. `arrived_at` is `time.monotonic()` when the HTTP request was admitted.

    `bad_word_ids` are the token sequences of `params.bad_words`. The completion follows `grammar`, if it is given, which
    is compiled: `definition` is the grammar as the library reads it. `adapter` None means the model alone. Only requests
    with the same `cache_salt` share keys and values. Where the prompt has `vectors`, its ids are from `FIRST_VECTOR_ID` on.
    The first `num_source_tokens` are those of an encoder, where the model has one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    arrived_at: float
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSource | None = None
    adapter: LoadedAdapter | None = None
    cache_salt: str | None = None
    definition: str = ""
    thinking: ThinkingLimit | None = None
    vectors: tuple[PromptVectors, ...] = ()
    num_source_tokens: int = 0

    def with_decoder(self, start_ids: tuple[int, ...], params: SamplingParams) -> Generate:
        """Return the request whose tokens are the source, followed by those with which the decoder starts."""
        token_ids = (*self.token_ids, *start_ids)
        return structs.replace(self, token_ids=token_ids, params=params, num_source_tokens=len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor as plain values.

    `datatype` is the Open Inference Protocol's name (FP32, INT64, …). `data` is little-endian and row-major.
    """

    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output tensor of a program.

    The first dimension of `shape` is the batch, -1. Any other -1 is a free dimension, equal within a batch. `sample` are
    sizes of the dimensions after the batch that a program accepts; empty: any.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    sample: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One tokenized text, including its special tokens.

    `type_ids` has one entry per token if the text has a second segment; empty means all 0. The first
    `num_prompt_tokens` are an instruction, which the model reads and pooling skips.
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """Texts of one request for an encoder.

    `outputs` are some of those that the model has: `embedding`, `logits`, `last_hidden_state`. `normalize` None
    means as the checkpoint says. `dimensions` is the number of leading dimensions kept of an embedding, before
    it is normalized; None means all.
    """

    request_id: str
    texts: tuple[Text, ...]
    outputs: tuple[str, ...]
    arrived_at: float
    normalize: bool | None = None
    dimensions: int | None = None


class Infer(Struct, frozen=True, array_like=True, tag=True):
    """Named tensors for an exported program, all with the same batch size. `outputs` are the requested names."""

    request_id: str
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    arrived_at: float


class RunTask(Struct, frozen=True, array_like=True, tag=True):
    """A task besides generation, such as `token-classification`, for a model that transformers computes.

    `inputs` is a JSON list. In place of pictures and sounds it has the numbers of the `files` that have their bytes.
    With `is_batch`, the result is a list with one for each input, otherwise that of the only one. `parameters` is a JSON
    object.
    """

    request_id: str
    task: str
    inputs: bytes
    parameters: bytes
    arrived_at: float
    files: tuple[bytes, ...] = ()
    is_batch: bool = False


class Abort(Struct, frozen=True, array_like=True, tag=True):
    """The client no longer needs this request. Unknown and finished ids are ignored."""

    request_id: str
    reason: Literal["aborted", "timeout", "stop"] = "aborted"  # "stop": the service found a stop string
    choice: int | None = None  # None: all choices of the request


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """End the worker thread once the events of what is running were delivered."""


EngineRequest = Generate | Encode | Infer | RunTask
Command = EngineRequest | Abort | SetAdapter | Stop

# ---- from the engine to the service ----------------------------------------------------------------------------------


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token's natural-log probability by the model itself, with its likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a sequence spent in each phase. `cached_tokens` of the prompt were found in the KV cache."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cached_tokens: int = 0
    encode_seconds: float = 0.0


class TokensReady(Struct, frozen=True, array_like=True, tag=True):
    """New completion tokens of one choice.

    `logprobs` is as long as `token_ids` if requested, else empty. `timings` comes with a choice's first
    tokens; its queue and prefill seconds and cached tokens are final then.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = None


class TokenScore(Struct, frozen=True, array_like=True):
    """A prompt token's natural-log probability after the tokens before it.

    `rank` is 1 for the most likely token. `top` are the most likely tokens at its position, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptScored(Struct, frozen=True, array_like=True, tag=True):
    """Scores of the prompt's next tokens. The first event begins with the second token: the first one has no score.

    All of them come before the first tokens of any choice.
    """

    request_id: str
    scores: tuple[TokenScore, ...]


class SequenceFinished(Struct, frozen=True, array_like=True, tag=True):
    """The end of one choice. After the last choice of a request the worker has forgotten the request.

    `token_ids` are final tokens not sent yet: a beam's whole completion, else empty. `stop_token_id` ended
    the sequence and is not text; `stop_logprob` is its log-probability, if requested.
    """

    request_id: str
    choice: int
    reason: FinishReason
    timings: Timings = Timings()
    num_completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_token_id: int | None = None
    stop_logprob: TokenLogprob | None = None


class ArraysReady(Struct, frozen=True, array_like=True, tag=True):
    """All outputs of an `Encode` or an `Infer`, by name, or of a `RunTask` as JSON: `result`. The request has ended.

    `embedding` is FP32 [texts, size] and `logits` FP32 [texts, labels], in the order of the texts.
    `last_hidden_state` is FP32 [tokens of all texts, size]. The outputs of an `Infer` have the shapes that its
    program gives, cut to the request's own rows. `num_tokens` is the number of tokens computed.
    """

    request_id: str
    arrays: Mapping[str, Array]
    timings: Timings = Timings()
    num_tokens: int = 0


class RequestFailed(Struct, frozen=True, array_like=True, tag=True):
    """The whole request has ended with this error."""

    request_id: str
    error: RequestError


Event = PromptScored | TokensReady | SequenceFinished | ArraysReady | RequestFailed
