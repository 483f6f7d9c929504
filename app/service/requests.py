"""Types between the service and the API dialects: requests, events of a generation stream, arrays, and the request log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import quote

from app.messages import Array, FinishReason, GrammarSource, SamplingParams, Text, Timings
from app.metrics.instruments import Api
from app.service.rate_limit import ClientAccount
from app.text.chat import ChatOptions
from app.text.tool_calls import ToolCallDelta
from app.tracing.request_trace import RequestTrace


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. One of `forced` must be called; empty if the model decides."""

    tools: tuple[Tool, ...]
    forced: tuple[Tool, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Infill:
    """What follows the gap of a fill-in-the-middle prompt, and other files (name and text), which come first.

    With `fits`, what is farthest from the gap is left out if the context is too short for all.
    """

    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    fits: bool = False


MEDIA_MARKER = "<__media__>"  # the place of a picture in a `prompt`, as in llama.cpp


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a message: in base64, the bytes of its file, or with `is_url` its address.

    `field` is its place in the body, for error messages.
    """

    data: str | bytes
    field: str
    is_url: bool = False


@dataclass(slots=True)
class GenerationRequest:
    """A generation request with exactly one of `prompt`, `token_ids` and `messages`.

    `request_id` is what the client sees (`x-request-id`); it need not be unique. `add_special_tokens` applies to
    `prompt` only: token ids are used unchanged, and a template writes its own special tokens. `echo` puts the prompt's
    text before each completion. `truncate_prompt_tokens` keeps the last tokens of the prompt, and with `truncate_right`
    the first ones; -1 means as many as fit. With `clips_max_tokens`, `max_tokens` may reach past the end of the
    context, where the completion ends with the reason `length`. With `infill`, the completion fills the gap after the
    prompt. `model` is the name of the model or an adapter; None means the model. Keys and values of the prompt are
    shared only with requests of the same `cache_salt`. Reasoning is closed after `thinking_budget` tokens; None: never.
    `pictures` are those of the parts {"type": "image"} of messages, or of `MEDIA_MARKER` in `prompt`, in their order.
    `task`, `source_lang` and `target_lang` are about the source text of a model with an encoder
    (`app/text/source_text.py`).
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
    chat_options: ChatOptions | None = None
    truncate_prompt_tokens: int | None = None
    truncate_right: bool = False
    grammar: GrammarSource | None = None
    tools: ToolUse | None = None
    separates_reasoning: bool = False
    clips_max_tokens: bool = False
    infill: Infill | None = None
    model: str | None = None
    cache_salt: str | None = None
    thinking_budget: int | None = None
    pictures: tuple[Picture, ...] = ()
    task: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None

    def __post_init__(self) -> None:
        given = sum(source is not None for source in (self.prompt, self.token_ids, self.messages))
        assert given == 1, "exactly one of prompt, token_ids and messages must be given"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens` of the prompt were found in the KV cache."""

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
class PromptToken:
    """A token of the prompt with its score. The first one has none: no token comes before it.

    `rank` is 1 for the most likely token at its position.
    """

    token_id: int
    text: str
    score: ScoredToken | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every stream: the request is valid and admitted.

    A refusal is raised before it, so a dialect awaits this event before it sends the status line.
    """

    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of one choice, with its tokens.

    `text` is empty if tokens without text end a choice, and where the tokens are `reasoning` or `tool_calls` instead,
    or not decided yet. `logprobs` is as long as `token_ids` if requested, else empty. `timings` comes with a choice's
    first tokens, so that a streaming response can report them before the rest is known. `prompt` has all tokens of the
    prompt if their scores were requested; it comes once, before the completion, and `text` is the echo of the prompt
    then.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    timings: Timings | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The end of one choice, once, after its last delta.

    `usage` covers the whole request so far; `num_completion_tokens` this choice only. `matched_stop` is the stop string
    or the stop token id that ended the choice, and `stop_token` that token, if log-probabilities were requested.
    """

    choice: int
    reason: FinishReason
    usage: Usage
    num_completion_tokens: int
    timings: Timings
    matched_stop: str | int | None = None
    stop_token: ScoredToken | None = None


StreamEvent = Accepted | TextDelta | ChoiceFinished


class Flow(Protocol):
    """The state of a connection."""

    write_paused: bool


@dataclass(slots=True)
class OpenFlow:
    """The state of an answer that takes everything."""

    write_paused: bool = False


@dataclass(slots=True)
class DirectOutput:
    """The way of a plain token to its response without the stream's reader (`OpenGeneration.arrive`).

    Attributes:
        emit: Add a text and the ids of its tokens to the response, after all that was sent before: as the event that the
            stream's reader would write, or as a part of a whole answer. None while the next event is of another kind.
        write: Write bytes to the connection. None before the response begins, and for a connection that cannot.
        flow: Says whether the client must read first. It is an attribute, since it is read for each token.
    """

    emit: Callable[[str, Sequence[int]], None] | None = None
    write: Callable[[bytes], None] | None = None
    flow: Flow = field(default_factory=OpenFlow)


# A text, a pair that is read as one (a query and a document), or token ids, to which no special tokens are added.
TextInput = str | tuple[str, str] | Text


@dataclass(frozen=True, slots=True)
class Truncation:
    """Handling of texts that are too long.

    With `truncates`, a text or pair is cut at its end, or at its start with `left`, to `max_tokens` tokens, special
    tokens included; -1: to as many as the model reads. Otherwise one that the model cannot read is refused. Before
    that, a query is cut to its first `max_query_tokens` tokens and a document to its first `max_document_tokens`,
    without special tokens; 0: not cut.
    """

    truncates: bool = False
    left: bool = False
    max_tokens: int = -1
    max_query_tokens: int = 0
    max_document_tokens: int = 0


NO_TRUNCATION = Truncation()


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """Texts for an encoder. `outputs` are some of the model's: `embedding`, `logits`, `last_hidden_state`.

    `request_id` is what the client sees; it need not be unique. `normalize` None means as the checkpoint says,
    `dimensions` None means all. `prompt` names one of the checkpoint's prompts, which is put before each text, or
    before the first of a pair; None means its default. The first `num_queries` texts are queries and the others
    documents; each kind gets its own prompt if the checkpoint has one. `field` is the dialect's name for the texts or
    documents, and `query_field` for the queries, used in error messages.
    """

    inputs: tuple[TextInput, ...]
    outputs: tuple[str, ...]
    api: Api
    request_id: str
    truncation: Truncation = NO_TRUNCATION
    normalize: bool | None = None
    dimensions: int | None = None
    prompt: str | None = None
    num_queries: int = 0
    field: str = "input"
    query_field: str = "query"


@dataclass(frozen=True, slots=True)
class Encoded:
    """`arrays` maps an output to its array as in `messages.ArraysReady`; `lengths` are each text's token count."""

    arrays: Mapping[str, Array]
    timings: Timings
    lengths: tuple[int, ...]

    @property
    def usage(self) -> Usage:
        return Usage(sum(self.lengths))


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """A task for the inputs of one request, as in `messages.RunTask`; `size` is about that of all inputs in bytes."""

    task: str
    inputs: bytes
    parameters: bytes
    api: Api
    request_id: str
    size: int
    files: tuple[bytes, ...] = ()
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result as JSON."""

    content: bytes
    timings: Timings
    num_tokens: int


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Arrays of a program's inputs, and files of `pictures` for those that are described as such."""

    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    api: Api
    request_id: str
    pictures: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inferred:
    """`arrays` maps an output to its array, with as many rows as the inputs."""

    arrays: Mapping[str, Array]
    timings: Timings


# ---- an HTTP request and its log line ---------------------------------------------------------------------------------


REQUEST_LOGGER = "armature.requests"
MAX_PATH_CHARACTERS = 100
log = logging.getLogger(REQUEST_LOGGER)


@dataclass(slots=True)
class ClientRequest:
    """One HTTP request: who pays for it, its trace, and what the model has done for it.

    `account` is None without limits, and `trace` if it is not sampled. The seconds are from arrival to the first step
    (`queue_seconds`) and to the first token, of the part that waited longest; None if there was none. `error` is the
    code of the error that its client was sent, also as the last event of a stream. `model` is the name of one of
    several models, empty otherwise. `rows` are those of a program's inputs, which has no tokens.
    """

    account: ClientAccount | None = None
    trace: RequestTrace | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    error: str = ""
    model: str = ""
    rows: int = 0

    def add(
        self, prompt_tokens: int, completion_tokens: int, queue_seconds: float | None, first_token_seconds: float | None
    ) -> None:
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.queue_seconds = _longest(self.queue_seconds, queue_seconds)
        self.first_token_seconds = _longest(self.first_token_seconds, first_token_seconds)


# The HTTP request that this context serves; None outside of one.
CLIENT_REQUEST: ContextVar[ClientRequest | None] = ContextVar("client_request", default=None)


def note_error(code: str) -> None:
    if (client_request := CLIENT_REQUEST.get()) is not None:
        client_request.error = code


def request_level(method: str) -> int:
    """Return the level of a request's line: probes, scrapes and pages, which only read, are logged at debug."""
    return logging.DEBUG if method in ("GET", "HEAD", "OPTIONS") else logging.INFO


def log_request(
    method: str, path: str, request_id: str, status: int, seconds: float, client_request: ClientRequest
) -> None:
    """Log a request that has ended, without any of its content. `seconds` count from its head to the end of the response.

    Characters of `path` that could end the line or colour a terminal are escaped. `status` is 499 (nginx's convention)
    if the client left.
    """
    fields: dict[str, object] = {
        "id": request_id,
        "method": method,
        "route": _escaped(path[:MAX_PATH_CHARACTERS]),
        "status": status,
        **_sizes(client_request),
        "queue_ms": _milliseconds(client_request.queue_seconds),
        "first_token_ms": _milliseconds(client_request.first_token_seconds),
        "total_ms": _milliseconds(seconds),
    }
    if client_request.model:
        fields["model"] = client_request.model
    if client_request.trace is not None:
        fields["trace_id"] = client_request.trace.exemplar["trace_id"]
    # `log.log` would look for the caller in the stack, which no form of the log shows.
    extra = {"fields": fields}
    log.handle(log.makeRecord(log.name, request_level(method), "", 0, _Line(fields), (), None, extra=extra))


def _sizes(client_request: ClientRequest) -> dict[str, int]:
    if client_request.rows:
        return {"rows": client_request.rows}
    return {"prompt_tokens": client_request.prompt_tokens, "completion_tokens": client_request.completion_tokens}


@dataclass(frozen=True, slots=True)
class _Line:
    """A message that is formatted by the thread that writes it."""

    fields: Mapping[str, object]

    def __str__(self) -> str:
        shown = " ".join(f"{name}={'-' if value is None else value}" for name, value in list(self.fields.items())[4:])
        return "{method} {route} {status} id={id} ".format_map(self.fields) + shown


@lru_cache(maxsize=128)  # most requests are for a few routes
def _escaped(path: str) -> str:
    return quote(path, safe="/:@!$&'()*+,;=~")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def _longest(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
